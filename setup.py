"""Puts the catalog and the certificates, which lie at the repository's root, into the package, and
packs as well where ``SPECPLAN_ARCHS`` asks for them.

``SPECPLAN_ARCHS``: archs to build packs for, separated by spaces or commas, or ``all``.
``SPECPLAN_FAMILIES``: only these families; default: all.
``SPECPLAN_HOST``: the kind of host that the packs are for; default: this machine's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def listed(name: str) -> list[str]:
    """The words of an environment variable."""
    return os.environ.get(name, "").replace(",", " ").split()


def load_pinned() -> ModuleType:
    """``tools/build/pinned.py``, without the package that it belongs to."""
    path = ROOT / "tools" / "build" / "pinned.py"
    spec = importlib.util.spec_from_file_location("pinned", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_packs(rooms: dict[str, Path], out: Path, *options: str) -> None:
    """Run ``specplan build`` of the copy that lies in these folders, whatever else is installed."""
    arguments = ["build", "--out", str(out), *options]
    for arch in listed("SPECPLAN_ARCHS"):
        arguments += ["--arch", arch]
    for family in listed("SPECPLAN_FAMILIES"):
        arguments += ["--family", family]
    for host in listed("SPECPLAN_HOST"):
        arguments += ["--host", host]
    command = load_pinned().command(rooms, "specplan.tools.cli", *arguments)
    # Elsewhere than in the sources, whose folders have the names of other people's packages.
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(command, cwd=elsewhere, check=False)
    if done.returncode != 0:
        raise SystemExit(
            "SPECPLAN_ARCHS is set and the packs could not be built (see above); without build "
            "isolation, install the build extra first, or unset SPECPLAN_ARCHS"
        )


def check_sources(package: Path, packs: Path) -> None:
    """The packs were compiled from the very files that go into the wheel, or there is no wheel."""
    for path in sorted(packs.glob("*/manifest.json")):
        plans = json.loads(path.read_text())["plans"]
        sources = {item for plan in plans.values() for item in plan["key"]["sources"].items()}
        if not sources:
            raise SystemExit(f"{path} names no sources")
        for module, digest in sorted(sources):
            place = package.joinpath(*module.split(".")[1:])
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
                raise SystemExit(
                    f"{path} was compiled from another {module} than the one of this wheel"
                )


class BuildPy(build_py):
    """``build_py`` that also copies the claims and their evidence beside their reader."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            if listed("SPECPLAN_ARCHS"):
                # Where `make plans` builds and where an editable install looks for packs.
                rooms = {"specplan": ROOT / "runtime"}
                rooms |= {f"specplan.{n}": ROOT / n for n in ("plans", "kernels", "tools")}
                build_packs(rooms, ROOT / "packs")
            return
        package = Path(self.build_lib).resolve() / "specplan"
        # What an earlier build left here would go into the wheel too.
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        shutil.copy2(ROOT / "catalog.yaml", package / "plans" / "catalog.yaml")
        for evidence in ("certificates", "simulations"):
            shutil.copytree(ROOT / evidence, package / "plans" / evidence, dirs_exist_ok=True)
        if listed("SPECPLAN_ARCHS"):
            self.add_packs(package)

    def add_packs(self, package: Path) -> None:
        """Compile packs with the package that was just copied, and keep what a runtime reads."""
        rooms = {"specplan": package}
        rooms |= {f"specplan.{name}": package / name for name in ("plans", "kernels", "tools")}
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "packs"
            build_packs(rooms, out, "--strict")
            check_sources(package, out)
            for manifest in sorted(out.glob("*/manifest.json")):
                arch = package / "_packs" / manifest.parent.name
                arch.mkdir(parents=True)
                for file in (manifest, *manifest.parent.glob("*.so")):
                    shutil.copyfile(file, arch / file.name)


class BdistWheel(bdist_wheel):
    """A wheel with packs is for one platform and any Python: packs hold host code and no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        if not listed("SPECPLAN_ARCHS"):
            return python, abi, platform
        hosts = listed("SPECPLAN_HOST")
        if len(hosts) > 1:
            raise SystemExit(f"a wheel is for one kind of host, not for {' and '.join(hosts)}")
        return "py3", "none", f"linux_{hosts[0]}" if hosts else platform


class WithPacks(Distribution):
    """A distribution for one platform where it has packs."""

    def has_ext_modules(self) -> bool:
        return bool(listed("SPECPLAN_ARCHS"))


setup(distclass=WithPacks, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
