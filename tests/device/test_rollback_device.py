"""Rollback on a GPU: whole sequences of steps, and a pool beyond 4 GiB.

Run where a pack is: ``SPECPLAN_PACKS=packs pytest tests/device``. Skipped without a GPU of a
catalogued arch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import specplan
import torch

PAGE_TOKENS = 128
LAYERS = 12


@pytest.fixture(scope="module")
def pack() -> Iterator[specplan.Pack]:
    loaded = specplan.load(candidates=True)
    loaded.prepare()
    yield loaded


class Caches:
    """Index-key planes of all layers and the position plane, as views into pools with other pages
    between.
    """

    def __init__(self, pages: int, device: str = "cuda") -> None:
        self.keys = torch.zeros(
            pages, LAYERS + 1, PAGE_TOKENS, 128, dtype=torch.bfloat16, device=device
        )
        self.positions = torch.zeros(pages, 2, PAGE_TOKENS, 3, dtype=torch.int32, device=device)
        self.planes = [self.keys[:, layer] for layer in range(LAYERS)] + [self.positions[:, 0]]

    def equal(self, other: Caches) -> bool:
        return torch.equal(
            self.keys.view(torch.int16), other.keys.view(torch.int16)
        ) and torch.equal(self.positions, other.positions)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("requests", "tokens", "steps"),
    [(1, 4, 100), (15, 4, 100), (16, 4, 100), (17, 8, 100), (64, 4, 30)],
)
def test_a_run_with_rejected_drafts_leaves_what_a_run_without_drafts_leaves(
    pack: specplan.Pack, requests: int, tokens: int, steps: int
) -> None:
    """gather -> the step writes every row -> commit, as one graph replayed with new places and
    counts.

    The other run writes only the accepted rows. Whole pools are compared, pages of no plane
    included.
    """
    per_request = -(-(steps + 1) * tokens // PAGE_TOKENS)
    pages = requests * per_request + 2
    drafted, plain = Caches(pages), Caches(pages)
    rows = requests * tokens
    layout, table = pack.rollback.describe(drafted.planes)
    old = torch.full((rows, layout.record_bytes), 0xA5, dtype=torch.uint8, device="cuda")
    pending = torch.zeros(1, dtype=torch.int32, device="cuda")
    page, within = (torch.zeros(rows, dtype=torch.int32, device="cuda") for _ in range(2))
    accepted = torch.ones(requests, dtype=torch.int32, device="cuda")
    new = [torch.zeros(rows, *p.shape[2:], dtype=p.dtype, device="cuda") for p in drafted.planes]

    def step() -> None:
        pack.rollback.gather.require(layout, tokens, table, page, within, old, pending)
        for plane, values in zip(drafted.planes, new, strict=True):
            plane[page, within] = values
        pack.rollback.commit.require(layout, tokens, table, page, within, old, pending, accepted)
        # A second commit of the same snapshot must find nothing to do.
        pack.rollback.commit.require(layout, tokens, table, page, within, old, pending, accepted)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    drafted.keys.zero_()
    drafted.positions.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    generator = torch.Generator("cuda").manual_seed(requests * 100 + tokens)
    owned = torch.randperm(pages, generator=generator, device="cuda")[: requests * per_request]
    owned = owned.view(requests, per_request)
    length = torch.zeros(requests, dtype=torch.int64, device="cuda")
    ordinal = torch.arange(tokens, device="cuda")
    for _ in range(steps):
        position = length[:, None] + ordinal
        page.copy_(owned.gather(1, position // PAGE_TOKENS).reshape(-1))
        within.copy_((position % PAGE_TOKENS).reshape(-1))
        count = torch.randint(1, tokens + 1, (requests,), generator=generator, device="cuda")
        accepted.copy_(count)
        kept = (ordinal < count[:, None]).reshape(-1).nonzero().squeeze(1)
        for values, plane in zip(new, plain.planes, strict=True):
            noise = torch.empty(values.shape, device="cuda").normal_(generator=generator)
            values.copy_(noise * 1000)
            plane[page[kept].long(), within[kept].long()] = values[kept]
        graph.replay()
        length += count
    torch.cuda.synchronize()
    assert int(torch.count_nonzero(plain.keys)) > steps * requests * LAYERS * 100
    assert drafted.equal(plain)


@pytest.mark.gpu
def test_a_pool_beyond_four_gib_is_addressed_correctly(pack: specplan.Pack) -> None:
    """Planes of 12 layers in one 9.4 GiB pool, rows in its first and last pages; the whole pool is
    compared.
    """
    pages = 24_000
    keys = torch.zeros(pages, LAYERS + 1, PAGE_TOKENS, 128, dtype=torch.bfloat16, device="cuda")
    assert keys.numel() * keys.element_size() > 9 << 30
    positions = torch.zeros(pages, 1, PAGE_TOKENS, 3, dtype=torch.int32, device="cuda")
    planes = [keys[:, layer] for layer in range(LAYERS)] + [positions[:, 0]]
    layout, table = pack.rollback.describe(planes)
    page = torch.tensor([0, 1, pages // 2, pages - 1], dtype=torch.int32, device="cuda")
    within = torch.tensor([0, 127, 64, 127], dtype=torch.int32, device="cuda")
    for number, plane in enumerate(planes):
        for row in range(4):
            plane[int(page[row]), int(within[row])] = 100 * number + row + 1
    total = keys.view(torch.int16).sum(dtype=torch.int64)
    old = torch.zeros(4, layout.record_bytes, dtype=torch.uint8, device="cuda")
    pending = torch.zeros(1, dtype=torch.int32, device="cuda")
    pack.rollback.gather.require(layout, 4, table, page, within, old, pending)
    for plane in planes:
        plane[page, within] = -7
    rejected = torch.tensor([1, 0, 1, 1], dtype=torch.int32, device="cuda")
    pack.rollback.restore.require(layout, 4, table, page, within, old, pending, rejected)
    for number, plane in enumerate(planes):
        for row in range(4):
            want = 100 * number + row + 1 if row != 1 else -7
            found = plane[int(page[row]), int(within[row])].float()
            assert bool((found == torch.tensor(want, dtype=plane.dtype).float()).all())
            plane[int(page[row]), int(within[row])] = 100 * number + row + 1
    assert keys.view(torch.int16).sum(dtype=torch.int64) == total
