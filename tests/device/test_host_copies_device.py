"""HostCopies with pinned memory and a stream that is behind the host. Needs a GPU, and no pack."""

from __future__ import annotations

import pytest
import torch
from specplan.errors import ColdCaptureError, ValueCheckError
from specplan.host_copies import HostCopies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_values_arrive_in_order_while_the_stream_is_busy() -> None:
    buffer = torch.zeros(4096, dtype=torch.int32, device="cuda")
    copies = HostCopies(buffer, check=False)
    seen = []
    values = torch.zeros(4096, dtype=torch.int32)
    torch.cuda._sleep(50_000_000)
    for step in range(20):
        values.fill_(step // 2)
        assert copies.copy_if_changed(values) is (step % 2 == 0)
        seen.append(buffer.clone())
    for step, found in enumerate(seen):
        assert torch.equal(found.cpu(), torch.full((4096,), step // 2, dtype=torch.int32))


def test_another_writer_is_seen_and_a_capture_takes_no_changes() -> None:
    buffer = torch.zeros(8, dtype=torch.int64, device="cuda")
    copies = HostCopies(buffer, check=True)
    values = torch.arange(8)
    assert copies.copy_if_changed(values) and not copies.copy_if_changed(values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer[3:4] += 1
        assert not copies.copy_if_changed(values)
        with pytest.raises(ColdCaptureError):
            copies.copy_if_changed(values + 1)
    graph.replay()
    with pytest.raises(ValueCheckError, match="row 3 is 4, where 3 was copied last"):
        copies.copy_if_changed(values)
