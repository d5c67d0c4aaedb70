"""A pack of stage that runs without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.shared import Shared

CELLS = """\
  stage:
    problems:
      segments16: {segments: 16}
    cells:
      - {problems: [segments16], requests: 1..16, tokens: 1, splits: 1, dtypes: [int32],
         candidate: [sm_90a], why: tests}
"""


@pytest.fixture(scope="session")
def setup(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The pack, and the simulator under it."""
    for needed in ("torch", "numpy", "cutlass"):
        pytest.importorskip(needed)
    from support.simulated_pack import simulated_pack

    with simulated_pack(shared, tmp_path_factory.mktemp("stage"), "stage", CELLS) as made:
        yield made
