"""``python -m specplan``: the command line, also where its script is not on the path."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from specplan.tools.cli import main as command_line
    except ModuleNotFoundError as error:
        # A server may have unpacked the package without its two requirements, or without the tools.
        missing = error.name or ""
        if missing.partition(".")[0] == "specplan":
            detail = f"this installation has no {missing}; install the whole package"
        else:
            detail = f"it needs {missing}; pip install {missing.replace('yaml', 'pyyaml')}"
        sys.exit(f"error: the command line of specplan cannot be imported: {detail}")
    command_line(prog_name="python -m specplan")


if __name__ == "__main__":
    main()
