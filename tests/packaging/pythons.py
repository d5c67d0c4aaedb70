"""Does every promised Python compile to the certified bytes, and a second time to the same bytes?

Each interpreter that is found gets an environment of its own under ``build/pythons``, with the
compiler and without torch; the one that runs this needs none. With each of them a plan of every op
is compiled anew and compared with the certificates (device code, launch code) and with the pack
(the whole object). The others also run the tests of ``plans``, which need nothing but Python.
Interpreters that are not on the machine are named, and fail nothing unless ``--all`` asks for them.

Run from the root, after ``make plans``: ``make pythons``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from specplan.plans import certificates, manifest
from specplan.plans.hosts import this_machine
from specplan.plans.plan import Plan
from specplan.tools.build import keys, pool

ROOT = Path(__file__).resolve().parents[2]
#: The arch that has certificates.
CERTIFIED = "sm_90a"


def interpreter(version: str) -> Path | None:
    """An interpreter of this version: ``python3.x`` of the path, or one of pyenv's."""
    found = shutil.which(f"python{version}")
    candidates = [Path(found)] if found else []
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    for path in candidates:
        # A shim is on the path for versions that are not active, and fails when it runs.
        done = subprocess.run([path, "-c", ""], capture_output=True, check=False)
        if done.returncode == 0:
            return path
    return None


def environment(python: Path, version: str) -> Path:
    """An environment of this interpreter with the build extra; made once. Returns its Python."""
    place = ROOT / "build" / "pythons" / version
    binary, stamp = place / "bin" / "python", place / "installed"
    wanted = (ROOT / "pyproject.toml").read_text()
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.run([python, "-m", "venv", "--clear", place], check=True)
        pip = [binary, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "--no-compile", "-e", f"{ROOT}[build]", "pytest>=8", "hypothesis>=6.100"],
            check=True,
            env={**os.environ, "SPECPLAN_ARCHS": ""},
        )
        stamp.write_text(wanted)
    return binary


def sample(pack: manifest.Manifest) -> list[Plan]:
    """One plan of every op of every family."""
    first: dict[tuple[str, str], Plan] = {}
    for _, plan in sorted(pack.plans.items()):
        first.setdefault((plan.family, plan.op), Plan(plan.family, plan.op, pack.arch, plan.spec))
    return list(first.values())


def differences(packs: Path, arch: str) -> list[str]:
    """Compile the sample with this interpreter; what differs from the certificates and the pack."""
    pack = manifest.read(packs / arch)
    evidence = certificates.read_all([certificates.default_directory()], arch)
    certified = {s: plan for certificate in evidence for s, plan in certificate.plans.items()}
    if arch == CERTIFIED and not certified:
        return [f"there are no certificates of {arch} to compare with"]
    # A family of candidates alone has no certificate: its objects are compared with the pack's.
    families = {certificate.family for certificate in evidence}
    plans, host = sample(pack), this_machine()
    wrong, as_certified, as_packed = [], 0, 0
    with tempfile.TemporaryDirectory() as directory:
        jobs = [
            pool.Job(
                plan, {host: Path(directory, f"{plan.symbol}.o")}, Path(directory, plan.symbol)
            )
            for plan in plans
        ]
        workers = len(os.sched_getaffinity(0))
        for outcome in pool.run(jobs, workers, threading.Event()):
            symbol = outcome.job.plan.symbol
            if outcome.record is None:
                wrong.append(f"{symbol}: {outcome.error}")
                continue
            if outcome.job.plan.family in families:
                found = certified.get(symbol)
                other = [
                    what
                    for what in ("device_code", "host_code")
                    if outcome.record[what] != getattr(found, what, None)
                ]
                wrong += [f"{symbol}: another {what} than the certified one" for what in other]
                as_certified += not other
            # The host's instructions too, where the pack was built from the same inputs.
            same = keys.digest(keys.key(outcome.job.plan)) == keys.digest(pack.plans[symbol].key)
            if not same:
                wrong.append(f"{symbol}: the pack was not built from these inputs")
            elif (
                outcome.record["objects"][host]["sha256"] != pack.plans[symbol].objects[host].sha256
            ):
                wrong.append(f"{symbol}: another object than the one in the pack")
            else:
                as_packed += 1
    version = ".".join(map(str, sys.version_info[:3]))
    count = len({plan.family for plan in plans})
    said = f", {as_certified} as certified" if certified else ""
    print(
        f"Python {version}, {arch}: {len(plans)} plans of {count} families compiled, "
        f"{as_packed} as in the pack{said}",
        flush=True,
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=Path, default=ROOT / "packs")
    parser.add_argument("--all", action="store_true", help="an interpreter not found is a fault")
    parser.add_argument("--here", action="store_true", help="only this interpreter, as it is")
    parser.add_argument("--arch", default=CERTIFIED)
    options = parser.parse_args()
    if options.here:
        wrong = differences(options.packs, options.arch)
        print("\n".join(f"  {line}" for line in wrong), end="\n" if wrong else "")
        return 1 if wrong else 0
    failed, missing = [], []
    for minor in keys.SAME_BYTES:
        version = f"3.{minor}"
        own = sys.version_info[:2] == (3, minor)
        python = Path(sys.executable) if own else interpreter(version)
        if python is None:
            missing.append(version)
            continue
        binary = python if own else environment(python, version)
        here = [__file__, "--here", "--packs", options.packs.resolve(), "--arch", options.arch]
        tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "tests" / "plans"]
        for what, command in (("bytes", here), ("tests of plans", tests)):
            if own and command is tests:
                continue  # `make test` runs them
            if subprocess.run([binary, *command], cwd=ROOT, check=False).returncode != 0:
                failed.append(f"{version}: {what}")
    if missing:
        print(f"not found, so not tried: Python {', '.join(missing)}")
    if failed:
        print(f"failed: {'; '.join(failed)}")
    return 1 if failed or (missing and options.all) else 0


if __name__ == "__main__":
    sys.exit(main())
