"""Puts the catalog and the certificates, which lie at the repository's root, into the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildPy(build_py):
    """``build_py`` that also copies the claims and their evidence beside their reader."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "specplan" / "plans"
        shutil.copy2(ROOT / "catalog.yaml", target / "catalog.yaml")
        shutil.copytree(ROOT / "certificates", target / "certificates", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildPy})
