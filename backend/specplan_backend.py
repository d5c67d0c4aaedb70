"""The build backend: setuptools, and the compiler too where packs go into the wheel.

``SPECPLAN_ARCHS=sm_90a pip install .`` builds packs, which needs what the ``build`` extra names. An
isolated build gets it from here; without isolation it must be installed already.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  every other hook is setuptools' own


def _compiler() -> list[str]:
    if not os.environ.get("SPECPLAN_ARCHS"):
        return []
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    root = Path(__file__).resolve().parent.parent
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["build"]]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What an isolated build of a wheel installs first."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """An editable install has no packs of its own: it finds those of the checkout's user."""
    return list(build_meta.get_requires_for_build_editable(config_settings))
