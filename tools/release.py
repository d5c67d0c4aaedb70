"""The files of a release: sdist, pure wheel, and a wheel with packs for each kind of host, built,
checked and listed. Run from the root: ``python tools/release.py`` (``make release``).

Everything is built from the sdist in isolated environments, so nothing of this checkout or its
environment gets in but the tracked files. The wheels with packs are manylinux wheels: auditwheel
judges what their libraries take from the system. tvm-ffi's library is left out on purpose, because
a process must have one of it, the server's own; CUDA's runtime is handed over by the loader.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: The oldest C library that the wheels promise to run on.
GLIBC = "manylinux_2_28"
#: auditwheel judges wheels of the machine that it runs on; told another one, it judges that one's.
AUDIT = (
    "import platform, sys; machine = sys.argv.pop(1); platform.machine = lambda: machine; "
    "from auditwheel.main import main; sys.exit(main())"
)
#: Libraries that packs take from the process that loads them; anything else fails the check.
FROM_THE_PROCESS = ("libtvm_ffi.so",)


class ReleaseError(RuntimeError):
    """A file of the release is not what it must be."""


def run(*command: str | Path, **more: str) -> str:
    """A command of this environment; its output, or a ReleaseError with it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PATH": path, "SPECPLAN_PACKS": "", **more},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
    return done.stdout


def only(directory: Path, pattern: str) -> Path:
    found = sorted(directory.glob(pattern))
    if len(found) != 1:
        raise ReleaseError(f"{directory} has {len(found)} files {pattern}")
    return found[0]


def build_sources(out: Path) -> tuple[Path, Path]:
    """The sdist, and the pure wheel that is made from it."""
    run(sys.executable, "-m", "build", "--outdir", out, ROOT, SPECPLAN_ARCHS="")
    return only(out, "specplan-*.tar.gz"), only(out, "specplan-*-py3-none-any.whl")


def build_packed(
    sdist: Path, out: Path, host: str, archs: Sequence[str], families: Sequence[str]
) -> Path:
    """The manylinux wheel with packs for one kind of host."""
    asked = {"SPECPLAN_ARCHS": " ".join(archs), "SPECPLAN_FAMILIES": " ".join(families)}
    if host != platform.machine():
        asked["SPECPLAN_HOST"] = host
    with tempfile.TemporaryDirectory() as directory:
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps")
        run(*pip, "-w", directory, sdist, **asked)
        raw = only(Path(directory), f"specplan-*-py3-none-linux_{host}.whl")
        excluded = [part for name in FROM_THE_PROCESS for part in ("--exclude", name)]
        tag = f"{GLIBC}_{host}"
        repaired = Path(directory) / "repaired"
        audit = (sys.executable, "-c", AUDIT, host, "repair", "--plat", tag, "--only-plat")
        run(*audit, *excluded, "--wheel-dir", repaired, raw)
        wheel = only(repaired, f"specplan-*-py3-none-{tag}.whl")
        check_packed(raw, wheel)
        target = out / wheel.name
        target.write_bytes(wheel.read_bytes())
    return target


def packed_files(wheel: Path) -> dict[str, zipfile.ZipInfo]:
    """The files of the packs in a wheel, by their path below ``_packs``."""
    with zipfile.ZipFile(wheel) as archive:
        start = "specplan/_packs/"
        return {
            info.filename.removeprefix(start): info
            for info in archive.infolist()
            if info.filename.startswith(start) and not info.is_dir()
        }


def check_packed(raw: Path, wheel: Path) -> None:
    """auditwheel changed the tag and no byte of a pack, and brought no library in; the packs are
    whole by the word of the specplan that is in the wheel.
    """
    with zipfile.ZipFile(raw) as before, zipfile.ZipFile(wheel) as after:
        names = set(packed_files(raw))
        if not names or names != set(packed_files(wheel)):
            raise ReleaseError(f"{wheel.name} has other files in its packs than {raw.name}")
        grafted = [n for n in after.namelist() if n.startswith("specplan.libs/")]
        if grafted:
            raise ReleaseError(f"{wheel.name}: auditwheel brought in {', '.join(grafted)}")
        for name in names:
            if before.read(f"specplan/_packs/{name}") != after.read(f"specplan/_packs/{name}"):
                raise ReleaseError(f"{wheel.name}: auditwheel changed {name}")
    with tempfile.TemporaryDirectory() as directory:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory)
        package = Path(directory) / "specplan"
        verify = ("verify", "--packs", package / "_packs")
        run(sys.executable, "-P", "-m", "specplan", *verify, PYTHONPATH=directory)


def listing(files: Sequence[Path]) -> dict[str, Any]:
    """Size and sha256 of every file, and of every pack inside: before compression and after."""
    found: dict[str, Any] = {}
    for path in files:
        data = path.read_bytes()
        entry: dict[str, Any] = {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "packs": {},
        }
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                for name, info in sorted(packed_files(path).items()):
                    pack = entry["packs"].setdefault(
                        name.split("/")[0], {"size": 0, "compressed": 0, "files": {}}
                    )
                    pack["size"] += info.file_size
                    pack["compressed"] += info.compress_size
                    pack["files"][name] = {
                        "size": info.file_size,
                        "compressed": info.compress_size,
                        "sha256": hashlib.sha256(archive.read(info)).hexdigest(),
                    }
        found[path.name] = entry
    return found


def table(found: dict[str, Any]) -> str:
    """The listing for people: a line a file of the release, and a line for each pack in it."""
    lines = [f"{'bytes':>12}  {'compressed':>12}  file and sha256"]
    for name, entry in found.items():
        lines.append(f"{'':12}  {entry['size']:>12,}  {name} {entry['sha256']}")
        for arch, pack in entry["packs"].items():
            libraries = sum(file.endswith(".so") for file in pack["files"])
            lines.append(
                f"{pack['size']:>12,}  {pack['compressed']:>12,}    {arch}: {libraries} libraries "
                "and the manifest"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--host", action="append", default=[], help="default: this machine's")
    parser.add_argument("--arch", action="append", default=[], help="default: all")
    parser.add_argument("--family", action="append", default=[], help="default: all")
    options = parser.parse_args()
    out: Path = options.out
    if list(out.glob("specplan-*")):
        print(f"error: {out} holds files of another release; move them away", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    try:
        sdist, pure = build_sources(out)
        packed = [
            build_packed(sdist, out, host, options.arch or ["all"], options.family)
            for host in options.host or [platform.machine()]
        ]
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = listing([sdist, pure, *packed])
    (out / "release.json").write_text(json.dumps(found, indent=1) + "\n")
    sums = [f"{entry['sha256']}  {name}\n" for name, entry in found.items()]
    (out / "SHA256SUMS").write_text("".join(sums))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
