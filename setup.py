"""Puts the catalog and the certificates, which lie at the repository's root, into the package, and
packs as well where ``SPECPLAN_ARCHS`` asks for them.

``SPECPLAN_ARCHS``: archs to build packs for, separated by spaces or commas, or ``all``.
``SPECPLAN_FAMILIES``: only these families; default: all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def listed(name: str) -> list[str]:
    """The words of an environment variable."""
    return os.environ.get(name, "").replace(",", " ").split()


class BuildPy(build_py):
    """``build_py`` that also copies the claims and their evidence beside their reader."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "specplan"
        shutil.copy2(ROOT / "catalog.yaml", package / "plans" / "catalog.yaml")
        shutil.copytree(
            ROOT / "certificates", package / "plans" / "certificates", dirs_exist_ok=True
        )
        if listed("SPECPLAN_ARCHS"):
            self.build_packs(package)

    def build_packs(self, package: Path) -> None:
        """Compile packs with the package that was just copied, and keep what a runtime reads."""
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "packs"
            command = [sys.executable, "-m", "specplan.tools.cli", "build", "--out", str(out)]
            for arch in listed("SPECPLAN_ARCHS"):
                command += ["--arch", arch]
            for family in listed("SPECPLAN_FAMILIES"):
                command += ["--family", family]
            # In front of whatever is installed: the packs are those of these sources.
            path = os.pathsep.join(
                filter(None, [str(package.parent), os.environ.get("PYTHONPATH")])
            )
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": path}, cwd=directory, check=False
            )
            if done.returncode != 0:
                raise SystemExit(
                    "SPECPLAN_ARCHS is set and the packs could not be built (see above); without "
                    "build isolation, install the build extra first, or unset SPECPLAN_ARCHS"
                )
            target = package / "_packs"
            shutil.rmtree(target, ignore_errors=True)
            for manifest in sorted(out.glob("*/manifest.json")):
                arch = target / manifest.parent.name
                arch.mkdir(parents=True)
                for file in (manifest, *manifest.parent.glob("*.so")):
                    shutil.copyfile(file, arch / file.name)


class BdistWheel(bdist_wheel):
    """A wheel with packs is for one platform and any Python: packs hold host code and no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if listed("SPECPLAN_ARCHS") else (python, abi, platform)


class WithPacks(Distribution):
    """A distribution for one platform where it has packs."""

    def has_ext_modules(self) -> bool:
        return bool(listed("SPECPLAN_ARCHS"))


setup(distclass=WithPacks, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
