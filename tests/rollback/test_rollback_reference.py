"""The reference against worked examples, against loops over bytes, and against a run that never
drafted.
"""

from __future__ import annotations

import pytest
import torch
from specplan.kernels.rollback import reference
from specplan.kernels.rollback.reference import StatePool
from specplan.plans.rollback import SHARES
from torch import Tensor

NONE = torch.empty(0, dtype=torch.int32)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_two_of_four_rows_go_back() -> None:
    planes = [torch.arange(12.0).view(2, 2, 3).bfloat16(), torch.arange(100, 112).view(2, 2, 3)]
    before = [plane.clone() for plane in planes]
    pages, within = ints(0, 0, 1, 1), ints(0, 1, 0, 1)
    old = [torch.zeros(4, 3, dtype=plane.dtype) for plane in planes]
    pending = ints(0)
    reference.gather(planes, pages, within, old, pending)
    for plane in planes:
        plane.fill_(-1)
    reference.commit(
        planes, pages, within, old, pending, ints(2), ints(0, 0, 0, 0), ints(0, 1, 2, 3)
    )
    for plane, was in zip(planes, before, strict=True):
        assert (plane[0] == -1).all()
        assert torch.equal(plane[1], was[1])


def test_a_page_outside_is_skipped_and_never_wraps() -> None:
    plane = torch.arange(8).view(2, 2, 2).int()
    was = plane.clone()
    pages, within = ints(-1, 2, 0, 0), ints(1, 0, -1, 2)
    old = torch.full((4, 2), 77, dtype=torch.int32)
    pending = ints(0)
    reference.gather([plane], pages, within, [old], pending)
    assert (old == 77).all()
    reference.restore([plane], pages, within, [old], pending, ints(1, 1, 1, 1))
    assert torch.equal(plane, was)


def test_staged_states_and_cursors() -> None:
    """Slots 1 and 2, accepted [context 1, 1, 3]: the first and the last candidate; a count of 0 is
    read as 1.
    """
    conv = StatePool(
        torch.zeros(4, 1, dtype=torch.bfloat16),
        torch.tensor([[10.0, 11, 12], [20, 21, 22]]).unsqueeze(2),
    )
    context = StatePool(
        torch.zeros(4, 1, dtype=torch.int32),
        torch.tensor([[100, 101, 102], [200, 201, 202]])[..., None],
    )
    cursors = ints(9, 9, 9, 9)
    states = [conv, context]
    accepted = ints(1, 1, 3)[1:]
    reference.commit(
        [], NONE, NONE, [], ints(SHARES), accepted, NONE, NONE, states, ints(1, 2), cursors
    )
    assert conv.pool.flatten().tolist() == [0, 10, 22, 0]
    assert context.pool.flatten().tolist() == [0, 100, 202, 0]
    assert cursors.tolist() == [9, 0, 2, 9]
    reference.commit(
        [], NONE, NONE, [], ints(SHARES), ints(0, 7), NONE, NONE, states, ints(3, -1), cursors
    )
    assert conv.pool.flatten().tolist() == [0, 10, 22, 10]
    assert cursors.tolist() == [9, 0, 2, 0]


def test_a_second_commit_of_one_snapshot_does_nothing() -> None:
    plane = torch.zeros(1, 2, 1, dtype=torch.int32)
    old, pending = torch.full((2, 1), 5, dtype=torch.int32), ints(SHARES)
    arguments = ([plane], ints(0, 0), ints(0, 1), [old], pending, ints(1), ints(0, 0), ints(0, 1))
    reference.commit(*arguments)
    assert plane.flatten().tolist() == [0, 5]
    plane.fill_(8)
    reference.commit(*arguments)
    reference.restore([plane], ints(0, 0), ints(0, 1), [old], pending, ints(1, 1))
    assert plane.flatten().tolist() == [8, 8]


@pytest.mark.parametrize("accepted", [-3, 0, 1, 3, 4, 5, 100])
def test_ordinal_0_stays_and_all_accepted_restores_nothing(accepted: int) -> None:
    ordinals = ints(0, 1, 2, 3)
    mask = reference.rejected_rows(ints(accepted), ints(0, 0, 0, 0), ordinals)
    assert mask.tolist() == [int(ordinal >= max(accepted, 1)) for ordinal in range(4)]


def test_rows_of_no_request_are_padding() -> None:
    mask = reference.rejected_rows(ints(1, 1), ints(-1, 0, 1, 2, 1 << 30), ints(3, 3, 3, 3, 3))
    assert mask.tolist() == [0, 1, 1, 0, 0]
    assert reference.rejected_rows(NONE, ints(0, 1), ints(3, 3)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "row"), [(torch.bfloat16, 128), (torch.int32, 3), (torch.float8_e4m3fn, 16)]
)
@pytest.mark.parametrize("seed", range(5))
def test_against_loops_over_rows(dtype: torch.dtype, row: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    pool = torch.randint(
        0, 256, (5, 2, 4, row * dtype.itemsize), generator=random, dtype=torch.uint8
    )
    plane = pool.view(dtype)[:, 1]
    pages = torch.randint(-2, 7, (40,), generator=random)
    within = torch.randint(-1, 5, (40,), generator=random)
    rejected = torch.randint(0, 2, (40,), generator=random, dtype=torch.int32)
    old = torch.randint(0, 256, (40, row * dtype.itemsize), generator=random, dtype=torch.uint8)
    expected_old, expected_pool = old.clone(), pool.clone()
    there = [
        (r, int(pages[r]), int(within[r]))
        for r in range(40)
        if 0 <= pages[r] < 5 and 0 <= within[r] < 4
    ]
    pending = ints(0)
    reference.gather([plane], pages, within, [old.view(dtype)], pending)
    for r, page, place in there:
        expected_old[r] = pool[page, 1, place]
    assert torch.equal(old, expected_old)
    pool.add_(1)
    expected_pool.add_(1)
    reference.restore([plane], pages, within, [old.view(dtype)], pending, rejected)
    for r, page, place in there:
        if rejected[r]:
            expected_pool[page, 1, place] = old[r]
    assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize(("requests", "tokens"), [(1, 4), (3, 8), (17, 2)])
def test_100_steps_equal_a_run_that_never_drafted(requests: int, tokens: int) -> None:
    random = torch.Generator().manual_seed(requests)
    tokens_a_page, pages_each = 16, 100 * tokens // 16 + 2
    total = requests * pages_each
    drafted = [torch.zeros(total, 16, 8).bfloat16(), torch.zeros(total, 16, 3, dtype=torch.int32)]
    plain = [plane.clone() for plane in drafted]
    block_table = torch.randperm(total, generator=random).view(requests, pages_each)
    length = torch.zeros(requests, dtype=torch.long)
    row_requests = torch.arange(requests).repeat_interleave(tokens).int()
    row_ordinals = torch.arange(tokens).repeat(requests).int()
    rows = requests * tokens
    old = [torch.zeros(rows, *plane.shape[2:], dtype=plane.dtype) for plane in drafted]
    pending = ints(0)
    for _ in range(100):
        position = length[:, None] + torch.arange(tokens)
        pages = block_table.gather(1, position // tokens_a_page).flatten()
        within = (position % tokens_a_page).flatten()
        accepted = torch.randint(1, tokens + 1, (requests,), generator=random).int()
        reference.gather(drafted, pages, within, old, pending)
        keep = row_ordinals < accepted[row_requests.long()]
        for plane, never in zip(drafted, plain, strict=True):
            new = torch.randint(1, 99, (rows, *plane.shape[2:]), generator=random).to(plane.dtype)
            plane[pages, within] = new
            never[pages[keep], within[keep]] = new[keep]
        reference.commit(drafted, pages, within, old, pending, accepted, row_requests, row_ordinals)
        length += accepted
    for plane, never in zip(drafted, plain, strict=True):
        assert torch.equal(plane, never)
        assert plane.any()
