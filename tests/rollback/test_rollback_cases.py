"""The cases: not vacuous, able to fail, and equal to what the tables' raw addresses say, read byte
by byte.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from specplan.kernels.rollback import cases
from specplan.kernels.rollback.cases import RollbackCase
from specplan.plans import rollback as plan

QSA = {"planes": 12, "row_bytes": 256, "side_planes": 1, "side_row_bytes": 12}
SMALL = {"planes": 2, "row_bytes": 24, "side_planes": 3, "side_row_bytes": 4}
CELLS = [(QSA, 1, 1), (QSA, 1, 4), (SMALL, 5, 3), (SMALL, 4, 4), (SMALL, 17, 1), (SMALL, 16, 5)]


def every(geometry: dict[str, int], requests: int, tokens: int, dtype: str) -> list[RollbackCase]:
    return list(cases.checks(geometry, requests, tokens, 1, dtype, "cpu"))


@pytest.mark.parametrize(("geometry", "requests", "tokens"), CELLS)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_expected_bytes_follow_from_the_tables(
    geometry: dict[str, int], requests: int, tokens: int, dtype: str
) -> None:
    for case in every(geometry, requests, tokens, dtype):
        case.refill(requests)
        expected = case.expect()
        by_address(case)
        assert int(case.identical(expected)) == 0, (case.op, case.name)


def test_cases_change_what_they_are_about() -> None:
    for case in every(QSA, 5, 4, "int32"):
        case.refill(3)
        before, expected = case.snapshot(), case.expect()
        changed = int((before != expected).sum())
        if "consumed" in case.name:
            assert changed == 0, case.name
        elif case.name == "no row":
            assert 0 < changed <= 4, case.name
        else:
            assert changed > 256, case.name


def test_half_means_half_at_few_rows() -> None:
    for requests in (1, 2, 4, 16):
        case = next(
            each for each in every(SMALL, requests, 4, "int32") if each.name == "half of the rows"
        )
        for seed in range(3):
            case.refill(seed)
            assert int(case.tensors["rejected"].sum()) == 2 * requests


def test_every_stray_byte_is_seen() -> None:
    """One byte flipped in any buffer, or in the guard before it, shows."""
    for case in every(SMALL, 3, 2, "int32"):
        case.refill(1)
        expected = case.expect()
        by_address(case)
        good = case.snapshot()
        for start, _, _ in case._views.values():
            for at in (start - 1, start):
                case.restore(good)
                case.buffer[at] ^= 1
                (comparison,) = case.compare(expected)
                assert float(comparison.error) == 1 > comparison.bound


def test_refill_is_a_function_of_the_seed() -> None:
    for case in every(SMALL, 3, 2, "int64"):
        case.refill(7)
        first = case.snapshot()
        case.refill(8)
        assert int(case.identical(first)) > 0
        case.refill(7)
        assert int(case.identical(first)) == 0


def test_outside_places_are_drawn() -> None:
    case = RollbackCase("outside", "gather", SMALL, 64, 2, "int32", "cpu", places="outside")
    case.refill(0)
    pages, within = case.tensors["pages"], case.tensors["within"]
    assert int(pages[0]) == -1
    for wrong in (case.pages, -(1 << 31), (1 << 31) - 1):
        assert (pages == wrong).any()
    assert (within == -1).any()
    assert (within == case.page_tokens).any()


def test_places_of_64_bits_exist_in_their_lower_half_alone() -> None:
    """A kernel that kept 32 bits of an index would move such a row."""
    case = RollbackCase("outside", "gather", SMALL, 64, 2, "int64", "cpu", places="outside")
    case.refill(0)
    for name, extent in (("pages", case.pages), ("within", case.page_tokens)):
        index = case.tensors[name]
        outside = (index < 0) | (index >= extent)
        truncated = index.int()
        assert (outside & (truncated >= 0) & (truncated < extent)).any(), name


def test_rows_of_no_request_hold_garbage() -> None:
    case = RollbackCase("listed", "commit", SMALL, 64, 2, "int32", "cpu", listed=True)
    case.refill(0)
    requests, ordinals = case.tensors["row_requests"], case.tensors["row_ordinals"]
    padding = (requests < 0) | (requests >= case.requests)
    assert padding.any() and not padding.all()
    assert torch.equal((ordinals < 0) | (ordinals >= case.tokens), padding)


def test_planes_with_gaps_in_their_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="rows must be dense"):
        cases.describe_plane(torch.zeros(2, 4, 8)[:, :, ::2])


def test_declined_calls_differ_from_a_good_one() -> None:
    seen = set()
    for what, arguments, _ in cases.declined(torch.device("cpu")):
        assert arguments["op"] in ("gather", "restore", "commit")
        seen.add(what)
    assert len(seen) > 50


def by_address(case: RollbackCase) -> None:
    """The op as the device does it: addresses from the tables, bytes moved one access at a time, no
    tensor indexing.
    """
    arguments = dict(zip(_names(case.op), case.compiled_arguments(), strict=True))
    listed = {
        k: v.tolist() for k, v in arguments.items() if isinstance(v, torch.Tensor) and k != "old"
    }
    old, tokens = arguments["old"], arguments.get("tokens", 0)
    live = listed["pending"][0] > 0
    rows = range(len(listed["pages"]))
    verdicts = listed.get("rejected") or [
        _verdict(row, tokens, listed) if case.op == "commit" else 0 for row in rows
    ]
    for fields in listed["planes"]:
        plane = plan.Plane(*fields)
        assert plane.row_bytes % plane.vector == 0
        for row in rows:
            page, place = listed["pages"][row], listed["within"][row]
            if not (0 <= page < plane.pages and 0 <= place < plane.page_tokens):
                continue
            cache = plane.base + page * plane.page_stride + place * plane.row_stride
            saved = old.data_ptr() + row * old.stride(0) + plane.record_offset
            assert cache % plane.vector == 0
            assert saved % plane.vector == 0
            if case.op == "gather":
                ctypes.memmove(saved, cache, plane.row_bytes)
            elif live and verdicts[row]:
                ctypes.memmove(cache, saved, plane.row_bytes)
    if live and case.op == "commit":
        _stage(listed)
        if case.staged:
            for request, slot in enumerate(listed["slots"]):
                if 0 <= slot < len(listed["cursors"]):
                    arguments["cursors"][slot] = max(listed["accepted"][request] - 1, 0)
    arguments["pending"][0] = plan.SHARES if case.op == "gather" else 0


def _names(op: str) -> list[str]:
    names = ["planes", "pages", "within", "old", "pending"]
    if op == "restore":
        names.append("rejected")
    if op == "commit":
        names += [
            "accepted",
            "row_requests",
            "row_ordinals",
            "states",
            "slots",
            "cursors",
            "tokens",
        ]
    return names


def _verdict(row: int, tokens: int, listed: dict[str, list[int]]) -> bool:
    request, ordinal = (
        divmod(row, tokens)
        if tokens
        else (
            listed["row_requests"][row],
            listed["row_ordinals"][row],
        )
    )
    counts = listed["accepted"]
    return 0 <= request < len(counts) and ordinal >= max(counts[request], 1)


_TYPES = {
    32: (torch.float32, torch.bfloat16),
    33: (torch.float32, torch.float16),
    34: (torch.bfloat16, torch.float32),
    35: (torch.float16, torch.float32),
    36: (torch.int64, torch.int32),
    37: (torch.int32, torch.int64),
}


def _stage(listed: dict[str, list]) -> None:
    for fields in listed["states"]:
        state = plan.State(*fields)
        for request, slot in enumerate(listed["slots"]):
            if not 0 <= slot < state.slots:
                continue
            count = min(max(listed["accepted"][request], 1), state.candidates)
            source = (
                state.candidates_base
                + request * state.request_stride
                + (count - 1) * state.candidate_stride
            )
            target = state.pool_base + slot * state.slot_stride
            if state.kind in (4, 8, 16):
                assert source % state.kind == target % state.kind == 0
                ctypes.memmove(target, source, state.kind * state.items)
                continue
            given, wanted = _TYPES[state.kind]
            data = bytearray(ctypes.string_at(source, state.items * given.itemsize))
            cast = torch.frombuffer(data, dtype=given).to(wanted).view(torch.uint8)
            ctypes.memmove(target, bytes(cast.tolist()), state.items * wanted.itemsize)


def test_the_sizes_between_pass_a_plain_case_of_each_op_and_a_turn_of_the_others() -> None:
    everything = {(case.op, case.name) for case in every(SMALL, 2, 2, "int32")}
    assert len(everything) == 15
    seen: set[tuple[str, str]] = set()
    for requests in range(33, 37):
        few = {(case.op, case.name) for case in every(SMALL, requests, 1, "int32")}
        assert len(few) == 6 and few < everything
        assert {op for op, _ in few} == {"gather", "restore", "commit"}
        seen |= few
    assert seen == everything, "four neighbouring sizes together pass all of them"
