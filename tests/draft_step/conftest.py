"""A pack of draft_step that runs without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.shared import Shared

CELLS = """\
  draft_step:
    problems:
      ids: {vocabulary_k: 0}
      class_32k: {vocabulary_k: 32}
    cells:
      - {problems: [ids], requests: [1..8, 16, 40], tokens: 1, splits: 1, dtypes: [int32, int64],
         candidate: [sm_90a], why: tests}
      - {problems: [class_32k], requests: 1..16, tokens: 1, splits: auto, dtypes: [bf16, fp32],
         candidate: [sm_90a], why: tests}
      - {problems: [class_32k], requests: 1..8, tokens: 1, splits: 3, dtypes: [bf16, fp32],
         candidate: [sm_90a], why: tests}
"""


@pytest.fixture(scope="session")
def setup(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The pack, and the simulator under it."""
    for needed in ("torch", "numpy", "cutlass"):
        pytest.importorskip(needed)
    from support.simulated_pack import simulated_pack

    with simulated_pack(shared, tmp_path_factory.mktemp("draft_step"), "draft_step", CELLS) as made:
        yield made
