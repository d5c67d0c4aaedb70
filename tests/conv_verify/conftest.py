"""A pack of conv_verify that runs without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.shared import Shared

CELLS = """\
  conv_verify:
    problems:
      small: {channels: 1024}
      odd: {channels: 520}
      wide: {channels: 1288}
    cells:
      - {problems: [small, odd, wide], requests: 1..13, tokens: 1..8, splits: auto, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
"""


@pytest.fixture(scope="session")
def setup(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The pack, and the simulator under it."""
    for needed in ("torch", "numpy", "cutlass"):
        pytest.importorskip(needed)
    from support.simulated_pack import simulated_pack

    scratch = tmp_path_factory.mktemp("conv_verify")
    with simulated_pack(shared, scratch, "conv_verify", CELLS) as made:
        yield made
