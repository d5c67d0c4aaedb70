"""A pack of argmax that runs without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.shared import Shared

CELLS = """\
  argmax:
    problems:
      class_32k: {vocabulary_k: 32}
    cells:
      - {problems: [class_32k], requests: [1..6, 8, 16, 32, 128], tokens: 1, splits: auto,
         dtypes: [bf16, fp32], candidate: [sm_90a], why: tests}
      - {problems: [class_32k], requests: 3, tokens: 1, splits: [1, 2, 5], dtypes: [bf16, fp32],
         candidate: [sm_90a], why: tests}
"""


@pytest.fixture(scope="session")
def setup(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The pack, and the simulator under it."""
    for needed in ("torch", "numpy", "cutlass"):
        pytest.importorskip(needed)
    from support.simulated_pack import simulated_pack

    scratch = tmp_path_factory.mktemp("argmax")
    with simulated_pack(shared, scratch, "argmax", CELLS) as made:
        yield made
