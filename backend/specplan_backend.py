"""The build backend: setuptools, and the compiler too where packs are built.

``SPECPLAN_ARCHS=sm_90a pip install .`` builds packs, which needs what the ``build`` extra names. An
isolated build gets it from here; without isolation it must be installed already.
"""

from __future__ import annotations

import os
import platform
import shutil
import tomllib
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  every other hook is setuptools' own


def _compiler() -> list[str]:
    if not os.environ.get("SPECPLAN_ARCHS"):
        return []
    root = Path(__file__).resolve().parent.parent
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["build"]]
    host = os.environ.get("SPECPLAN_HOST", "").strip()
    if host and host != platform.machine():
        # pip fetches the compiler's static library for that host.
        needed.append("pip")
        if not os.environ.get(f"CC_{host}") and shutil.which(f"{host}-linux-gnu-gcc") is None:
            needed += extras["cross"]
    return needed


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What an isolated build of a wheel installs first."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """What an isolated editable install installs first; its packs go to the checkout."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler()]
