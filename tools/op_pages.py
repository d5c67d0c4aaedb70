"""The argument tables of ``docs/ops``, from what the ops declare (``plans/signature.py``).

``python -m specplan.tools.op_pages`` prints what differs and exits with 1; ``--write`` renews the
tables between the pages' marks.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from specplan.plans.families import SIGNATURES

#: Where a table begins, with the op's name, and where it ends.
START, END = "<!-- arguments of {} -->", "<!-- end of arguments -->"


def default_directory() -> Path:
    """The pages of a checkout."""
    return Path(__file__).resolve().parent.parent / "docs" / "ops"


def tables(family: str) -> Mapping[str, str]:
    """The table of each op of a family, by the op's name."""
    return {name: op.table() for name, op in SIGNATURES[family].items()}


def renewed(text: str, family: str) -> str:
    """A page with the tables that the family's ops declare.

    Raises
    ------
    ValueError
        An op of the family has no marks in the page, or not once.
    """
    for name, table in tables(family).items():
        start = START.format(name)
        pattern = re.compile(re.escape(start) + r"\n.*?" + re.escape(END), re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"the page of {family} needs {start!r} and {END!r} once")
        text = pattern.sub(lambda _, s=start, t=table: f"{s}\n\n{t}\n\n{END}", text)  # type: ignore[misc]
    return text


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew the pages")
    options = parser.parse_args()
    wrong = 0
    for family in SIGNATURES:
        path = default_directory() / f"{family}.md"
        text = path.read_text(encoding="utf-8")
        new = renewed(text, family)
        if options.write:
            path.write_text(new, encoding="utf-8")
        elif new != text:
            print(f"{path} has other tables than the ops declare; --write renews them")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())
