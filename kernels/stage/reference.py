"""``stage`` in plain torch: the record's words to each destination, on CPU or GPU."""

from __future__ import annotations

from typing import Any

import torch


def stage(record: torch.Tensor, segments: Any) -> None:
    """Fill the destinations in place; arguments as :meth:`specplan.stage.Stage.__call__`, any
    devices: the record may be host memory that is not mapped.
    """
    for view, offset in zip(segments.views, segments.offsets, strict=True):
        if view.shape[0]:
            view.copy_(record[offset : offset + view.shape[0]])
