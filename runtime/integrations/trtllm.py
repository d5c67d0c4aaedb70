"""TensorRT-LLM: its tensors as arguments of specplan's ops (see ``docs/servers.md``).

Pages of 32 tokens, int32 tables padded with -1, lists of 2051 and fp32 scales of one element are
what the ops take as they stand. Pages of 128 are cut in four by a view.
"""

from __future__ import annotations

from specplan.integrations.paging import Recut, recut
from specplan.integrations.tensors import (
    by_request,
    gate_parameters,
    int32_into,
    packed_heads,
    replay_records,
    scale,
)

__all__ = [
    "Recut",
    "by_request",
    "gate_parameters",
    "int32_into",
    "packed_heads",
    "recut",
    "replay_records",
    "scale",
]
