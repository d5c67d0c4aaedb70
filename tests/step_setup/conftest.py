"""A pack of step_setup that runs without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.shared import Shared

CELLS = """\
  step_setup:
    problems:
      group4: {group: 4}
      group1: {group: 1}
      group128: {group: 128}
    cells:
      - {problems: [group4, group1], requests: 1..1024, tokens: 1..8, splits: 1,
         dtypes: [int32, int64], candidate: [sm_90a], why: tests}
      - {problems: [group128], requests: [1, 2, 4, 8, 16, 64, 512], tokens: 1..8, splits: 1,
         dtypes: [int32, int64], candidate: [sm_90a], why: tests}
"""


@pytest.fixture(scope="session")
def setup(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The pack, and the simulator under it."""
    for needed in ("torch", "numpy", "cutlass"):
        pytest.importorskip(needed)
    from support.simulated_pack import simulated_pack

    scratch = tmp_path_factory.mktemp("step-setup")
    with simulated_pack(shared, scratch, "step_setup", CELLS) as made:
        yield made
