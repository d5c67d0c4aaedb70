"""What the tests of the commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import synthetic


@pytest.fixture
def place(tmp_path: Path) -> synthetic.Place:
    """Packs of both archs in which every claim holds."""
    return synthetic.place(tmp_path)
