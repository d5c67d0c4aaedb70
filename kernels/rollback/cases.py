"""Inputs and expected results for the cells of ``rollback``: what tests, certification and
benchmarks run.

Every buffer of a case, inputs included, lies in one storage with guard bytes between them, so one
comparison covers what must change, what must not, and every stray write. Rollback moves bits and
its casts round once, as torch does: the bound is no differing byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from specplan.kernels.case import Comparison
from specplan.kernels.rollback import reference
from specplan.kernels.rollback.reference import StatePool
from specplan.plans import rollback as plan
from torch import Tensor

INDEX: Mapping[str, torch.dtype] = {"int32": torch.int32, "int64": torch.int64}

#: Guard bytes between buffers, and the alignment of a buffer that is not moved off it on purpose.
GUARD = 256
#: Up to this many rows a mask rejects exactly half of them: a random mask of 4 rows may reject none
#: or all.
FEW_ROWS = 64

#: Staged states: dtype of the candidates, dtype of the pool, elements of a state. Copies of every
#: access width, all casts.
STATES: tuple[tuple[torch.dtype, torch.dtype, int], ...] = (
    (torch.float32, torch.bfloat16, 192),
    (torch.int64, torch.int32, 3),
    (torch.bfloat16, torch.bfloat16, 1536),
    (torch.int32, torch.int32, 3),
    (torch.float32, torch.float16, 130),
    (torch.bfloat16, torch.float32, 66),
    (torch.float16, torch.float32, 65),
    (torch.int32, torch.int64, 5),
    (torch.float16, torch.float16, 44),
)


#: At 2048 rows a cell's cases hold some 150 MB, and certification keeps four copies of them.
CELLS_A_GRAPH = 4


def checks(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    splits: int,
    dtype: str,
    device: torch.device | str,
) -> Iterator[RollbackCase]:
    """The cases that a cell must pass. No result depends on ``splits``.

    Small batches and the sizes that graphs are captured for pass all of them. The batch sizes
    between run the same plans with other splits: they pass one plain case of each op and a quarter
    of the others, which take turns from cell to cell.
    """
    crooked = {"page_tokens": 5}
    plain: list[tuple[str, str, dict[str, Any]]] = [
        ("distinct places", "gather", {}),
        ("half of the rows", "restore", {}),
        ("rows in request order", "commit", {}),
    ]
    special: list[tuple[str, str, dict[str, Any]]] = [
        (
            "places outside, 8 bytes off",
            "gather",
            {"places": "outside", "shift": 8, **crooked},
        ),
        ("shared places, 4 bytes off", "gather", {"places": "shared", "shift": 4}),
        (
            "half of the rows, shared places, 8 bytes off",
            "restore",
            {"places": "shared", "shift": 8},
        ),
        (
            "every row, places outside, 4 bytes off",
            "restore",
            {"mask": "all", "places": "outside", "shift": 4, **crooked},
        ),
        ("no row", "restore", {"mask": "none"}),
        ("a consumed snapshot", "restore", {"mask": "all", "armed": False}),
        ("listed rows, some of no request", "commit", {"listed": True, **crooked}),
        ("counts below 1 and above the tokens", "commit", {"counts": "wild"}),
        ("one accepted each, 4 bytes off", "commit", {"counts": "one", "shift": 4}),
        (
            "places outside",
            "commit",
            {"counts": "one", "places": "outside", "listed": True},
        ),
        ("no staged state", "commit", {"staged": False}),
        ("a consumed snapshot", "commit", {"armed": False}),
    ]
    thorough = requests <= 16 or requests % 32 == 0
    turn = requests + tokens
    chosen = [case for at, case in enumerate(special) if thorough or (at + turn) % 4 == 0]
    for name, op, options in (*plain, *chosen):
        yield RollbackCase(name, op, geometry, requests, tokens, dtype, device, **options)


class RollbackCase:
    """One call of ``gather``, ``restore`` or ``commit`` (see :class:`specplan.kernels.case.Case`).

    Parameters
    ----------
    places
        ``distinct`` places, ``shared`` by about three rows each, or some ``outside`` of the planes.
    shift
        Bytes by which pools and states are moved off their alignment: 0, 4 or 8.
    mask
        Rejected rows of a restore: ``half``, ``all`` or ``none``.
    counts
        Accepted counts of a commit: ``any`` of 1..tokens, ``one`` each, or ``wild`` values far
        outside.
    listed, staged
        Whether a commit lists its rows instead of having them in request order, and whether it has
        staged states.
    armed
        Whether the snapshot is pending.
    """

    measure = "bytes that differ"

    def __init__(
        self,
        name: str,
        op: str,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        dtype: str,
        device: torch.device | str,
        *,
        places: str = "distinct",
        shift: int = 0,
        mask: str = "half",
        counts: str = "any",
        listed: bool = False,
        staged: bool = True,
        armed: bool = True,
        page_tokens: int = 128,
    ) -> None:
        self.name, self.op = name, op
        self.geometry, self.requests, self.tokens = dict(geometry), requests, tokens
        self.dtype, self.rows, self.page_tokens = dtype, requests * tokens, page_tokens
        self.places, self.mask, self.counts = places, mask, counts
        self.listed, self.staged, self.armed = listed, staged and op == "commit", armed
        self.pages = 2 + -(-5 * self.rows // (4 * page_tokens))
        self.slots = requests + 3
        self.states = STATES if self.staged else ()
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device)

        self._views: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._size = GUARD
        groups = [
            (geometry["planes"], geometry["row_bytes"]),
            (geometry["side_planes"], geometry["side_row_bytes"]),
        ]
        self.groups = [(count, row) for count, row in groups if count]
        for i, (count, row) in enumerate(self.groups):
            # Planes interleaved page by page, with a page of no plane behind the last: a stray
            # write into another plane shows, and the page stride is not the dense one.
            shape = (self.pages, count + 1, page_tokens, row)
            self._add(f"pool{i}", torch.uint8, *shape, shift=shift)
        record = plan.layout(self._describe(0)).record_bytes
        self._add("planes", torch.int64, sum(n for n, _ in self.groups), plan.PLANE_FIELDS)
        self._add("pages", INDEX[dtype], self.rows)
        self._add("within", INDEX[dtype], self.rows)
        # A snapshot for one row more, with records wider than they need to be.
        self._add("old", torch.uint8, self.rows + 1, record + plan.VECTOR)
        self._add("pending", torch.int32, 1)
        if op == "restore":
            self._add("rejected", torch.int32, self.rows)
        if op == "commit":
            self._add("accepted", torch.int32, requests)
            self._add("row_requests", torch.int32, self.rows if listed else 0)
            self._add("row_ordinals", torch.int32, self.rows if listed else 0)
            self._add("states", torch.int64, len(self.states), plan.STATE_FIELDS)
            self._add("slots", torch.int32, requests if self.staged else 0)
            self._add("cursors", torch.int32, self.slots if self.staged else 0)
        for i, (given, wanted, size) in enumerate(self.states):
            self._add(f"candidates{i}", given, requests, tokens, size, shift=shift)
            # One slot of no request on either side.
            self._add(f"state{i}", wanted, self.slots + 2, size, shift=shift)

        self.buffer = torch.empty(
            -(-self._size // GUARD) * GUARD, dtype=torch.uint8, device=self.device
        )
        self.tensors = self._tensors(self.buffer)
        # Records with a gap behind them, where planes are off their alignment.
        self._record = record if shift else record + plan.VECTOR
        self.layout = plan.layout(self._describe(self.buffer.data_ptr()))
        pools = [describe_state(pool) for pool in self._states(self.tensors)]
        self._tables = {
            "planes": torch.tensor(self.layout.table(), device=self.device),
            "states": torch.tensor(plan.state_table(pools), device=self.device),
        }

    # ----- the case's call

    def arguments(self) -> Mapping[str, Any]:
        """The op's arguments by name; what a call leaves out is None."""
        named: dict[str, Any] = {"layout": self.layout, "tokens": self.tokens}
        named |= {key: self.tensors[key] for key in ("planes", "pages", "within", "pending")}
        named["old"] = self.tensors["old"][:, : self._record]
        if self.op == "restore":
            named["rejected"] = self.tensors["rejected"]
        if self.op == "commit":
            named["accepted"] = self.tensors["accepted"]
            for key in ("row_requests", "row_ordinals"):
                named[key] = self.tensors[key] if self.listed else None
            for key in ("states", "slots", "cursors"):
                named[key] = self.tensors[key] if self.staged else None
        return named

    def compiled_arguments(self) -> tuple[Tensor | int, ...]:
        """The compiled function's arguments in its order, without the layout's and the plan's
        integers.
        """
        names = ["planes", "pages", "within", "old", "pending"]
        if self.op == "restore":
            names.append("rejected")
        if self.op == "commit":
            names += ["accepted", "row_requests", "row_ordinals", "states", "slots", "cursors"]
        tensors = {**self.tensors, "old": self.arguments()["old"]}
        tokens = (0 if self.listed else self.tokens,) if self.op == "commit" else ()
        return (*(tensors[key] for key in names), *tokens)

    def pick(self) -> Mapping[str, Any]:
        sizes = {"requests": self.requests, "tokens": self.tokens, "dtype": self.dtype}
        return {**self.geometry, **sizes}

    def refill(self, seed: int) -> None:
        """New random bytes everywhere, then the inputs that have to mean something."""
        self.generator.manual_seed(seed)
        words = self.buffer.view(torch.int32)
        words.random_(-(1 << 31), (1 << 31) - 1, generator=self.generator)
        tensors = self.tensors
        page, within = self._draw_places()
        tensors["pages"].copy_(page)
        tensors["within"].copy_(within)
        tensors["planes"].copy_(self._tables["planes"])
        tensors["pending"].fill_(0)
        if self.op == "gather":
            return
        # The saved rows are those of a cache that the step has overwritten since: rows that share a
        # place agree.
        earlier = self.buffer.clone()
        earlier.view(torch.int32).random_(-(1 << 31), (1 << 31) - 1, generator=self.generator)
        places = tensors["pages"], tensors["within"]
        planes = self._planes(self._tensors(earlier))
        reference.gather(planes, *places, self._saved(tensors), tensors["pending"])
        if not self.armed:
            tensors["pending"].fill_(0)
        if self.op == "restore":
            tensors["rejected"].copy_(self._draw_mask())
            return
        tensors["accepted"].copy_(self._draw_counts())
        if self.listed:
            requests, ordinals = self._draw_lists()
            tensors["row_requests"].copy_(requests)
            tensors["row_ordinals"].copy_(ordinals)
        if self.staged:
            tensors["states"].copy_(self._tables["states"])
            tensors["slots"].copy_(self._draw_slots())
        for pool in self._states(tensors):
            if pool.candidates.is_floating_point():
                # NaN payloads are no part of the contract of a cast.
                noise = torch.empty(pool.candidates.shape, device=self.device)
                pool.candidates.copy_(noise.normal_(generator=self.generator))

    def snapshot(self) -> Tensor:
        return self.buffer.clone()

    def restore(self, snapshot: Tensor) -> None:
        self.buffer.copy_(snapshot)

    def expect(self) -> Tensor:
        expected = self.buffer.clone()
        after = self._tensors(expected)
        common = (
            self._planes(after),
            after["pages"],
            after["within"],
            self._saved(after),
            after["pending"],
        )
        if self.op == "gather":
            reference.gather(*common)
        elif self.op == "restore":
            reference.restore(*common, after["rejected"])
        else:
            reference.commit(
                *common,
                after["accepted"],
                *self._lists(after),
                self._states(after),
                after["slots"],
                after["cursors"],
            )
        return expected

    def compare(self, expected: Tensor) -> Iterator[Comparison]:
        yield Comparison("all buffers and guards", self.measure, self.identical(expected), 0)

    def identical(self, snapshot: Tensor) -> Tensor:
        return (self.buffer != snapshot).sum()

    # ----- views

    def _add(self, name: str, dtype: torch.dtype, *shape: int, shift: int = 0) -> None:
        start = -(-self._size // GUARD) * GUARD + -(-shift // dtype.itemsize) * dtype.itemsize
        self._views[name] = (start, dtype, shape)
        self._size = start + prod(shape) * dtype.itemsize + GUARD

    def _tensors(self, storage: Tensor) -> dict[str, Tensor]:
        return {
            name: storage[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (start, dtype, shape) in self._views.items()
        }

    def _describe(self, base: int) -> list[plan.Plane]:
        """The planes one by one, as the plane table has them."""
        planes = []
        for i, (count, row) in enumerate(self.groups):
            start, page = self._views[f"pool{i}"][0], self.page_tokens * row
            planes += [
                plan.plane(
                    base + start + at * page,
                    (count + 1) * page,
                    row,
                    self.pages,
                    self.page_tokens,
                    row,
                )
                for at in range(count)
            ]
        return planes

    def _planes(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Planes of one row size taken as one plane of longer rows, [pages, page_tokens, planes,
        row]: few torch calls.
        """
        return [
            tensors[f"pool{i}"][:, :count].transpose(1, 2)
            for i, (count, _) in enumerate(self.groups)
        ]

    def _saved(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The saved rows to match, [rows, planes, row]."""
        saved, first = [], 0
        old = tensors["old"][: self.rows]
        for count, row in self.groups:
            offsets = [each.record_offset for each in self.layout.planes[first : first + count]]
            stride = offsets[1] - offsets[0] if count > 1 else row
            if offsets != [offsets[0] + at * stride for at in range(count)]:
                raise AssertionError("planes of one size are not evenly placed in the record")
            shape, strides = (self.rows, count, row), (old.stride(0), stride, 1)
            saved.append(old.as_strided(shape, strides, old.storage_offset() + offsets[0]))
            first += count
        return saved

    def _states(self, tensors: Mapping[str, Tensor]) -> list[StatePool]:
        return [
            StatePool(tensors[f"state{i}"][1:-1], tensors[f"candidates{i}"])
            for i in range(len(self.states))
        ]

    def _lists(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        if self.listed:
            return tensors["row_requests"], tensors["row_ordinals"]
        return self._in_order()

    def _in_order(self) -> tuple[Tensor, Tensor]:
        row = torch.arange(self.rows, device=self.device, dtype=torch.int32)
        return torch.div(row, self.tokens, rounding_mode="floor").int(), row % self.tokens

    # ----- random inputs that mean something

    def _draw_places(self) -> tuple[Tensor, Tensor]:
        total = self.pages * self.page_tokens
        place = torch.randperm(total, generator=self.generator, device=self.device)[: self.rows]
        if self.places == "shared":
            place = place[self._below(max(1, self.rows // 3), self.rows)]
        page, within = place // self.page_tokens, place % self.page_tokens
        if self.places == "outside":
            kind = self._below(8, self.rows)
            kind[0] = 0  # page -1, which torch would wrap to the last page, is always there
            for code, wrong in enumerate((-1, self.pages, -(1 << 31), (1 << 31) - 1)):
                page = torch.where(kind == code, wrong, page)
            if self.dtype == "int64":
                # A page and a place that would exist in their lower 32 bits.
                page = torch.where(kind == 3, page % self.pages + (1 << 32), page)
                within = torch.where(kind == 6, within - (1 << 32), within)
            within = torch.where(kind == 4, -1, within)
            within = torch.where(kind == 5, self.page_tokens, within)
        return page, within

    def _draw_mask(self) -> Tensor:
        rejected = torch.zeros(self.rows, dtype=torch.int32, device=self.device)
        if self.mask == "all":
            # Any value but zero rejects.
            rejected.random_(1, 1 << 30, generator=self.generator)
            rejected[::2] *= -1
        elif self.mask == "half" and self.rows <= FEW_ROWS:
            order = torch.randperm(self.rows, generator=self.generator, device=self.device)
            rejected = (order < (self.rows + 1) // 2).int()
        elif self.mask == "half":
            rejected = self._chance(0.5, self.rows).int()
        return rejected

    def _draw_counts(self) -> Tensor:
        accepted = 1 + self._below(self.tokens, self.requests)
        if self.counts == "one":
            accepted = torch.ones_like(accepted)
        if self.counts == "wild":
            wild = torch.tensor(
                [0, -1, -(1 << 31), self.tokens + 1, (1 << 31) - 1], device=self.device
            )
            drawn = wild[self._below(len(wild), self.requests)]
            accepted = torch.where(self._chance(0.7, self.requests), drawn, accepted)
            accepted[0] = 0
        return accepted

    def _draw_lists(self) -> tuple[Tensor, Tensor]:
        """Rows in any order, a fifth of them padding: of no request, with garbage as ordinal."""
        requests, ordinals = self._in_order()
        order = torch.randperm(self.rows, generator=self.generator, device=self.device)
        requests, ordinals = requests[order], ordinals[order]
        nobody = torch.where(ordinals % 2 == 0, -1, self.requests + ordinals)
        padding = self._chance(0.2, self.rows)
        garbage = torch.where(order % 2 == 0, (1 << 31) - 1, -(1 << 31))
        return (
            torch.where(padding, nobody, requests),
            torch.where(padding, garbage, ordinals),
        )

    def _draw_slots(self) -> Tensor:
        """Distinct slots in any order, some requests without one."""
        slots = torch.randperm(self.slots, generator=self.generator, device=self.device)
        slots = slots[: self.requests]
        nowhere = torch.where(slots % 2 == 0, -1, self.slots + slots)
        return torch.where(self._chance(0.15, self.requests), nowhere, slots)

    def _below(self, bound: int, count: int) -> Tensor:
        return torch.randint(bound, (count,), generator=self.generator, device=self.device)

    def _chance(self, chance: float, count: int) -> Tensor:
        return torch.rand(count, generator=self.generator, device=self.device) < chance


def describe_plane(plane: Tensor) -> plan.Plane:
    """The plane table's entry for a tensor ``[pages, page_tokens, *row]`` with dense rows."""
    item = plane.element_size()
    row = plane.shape[2:]
    if plane.stride()[2:] != torch.empty(row, device="meta").stride():
        raise ValueError(f"a plane's rows must be dense, they have strides {plane.stride()[2:]}")
    page_stride, row_stride = (stride * item for stride in plane.stride()[:2])
    pages, page_tokens = plane.shape[:2]
    return plan.plane(
        plane.data_ptr(), page_stride, row_stride, pages, page_tokens, prod(row) * item
    )


def describe_state(state: StatePool) -> plan.State:
    """The state table's entry for a state pool and its candidates, both with dense states."""
    given, pool = state.candidates, state.pool
    return plan.state(
        given.data_ptr(),
        given.stride(0) * given.element_size(),
        given.stride(1) * given.element_size(),
        given.shape[1],
        pool.data_ptr(),
        pool.stride(0) * pool.element_size(),
        pool.shape[0],
        prod(pool.shape[1:]),
        _name(given.dtype),
        _name(pool.dtype),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def declined(device: torch.device) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
    """Calls that must be declined and write nothing: what is wrong, the arguments with the op's
    name under ``op``, and the storage that must not change.
    """
    geometry = {"planes": 12, "row_bytes": 256, "side_planes": 1, "side_row_bytes": 12}

    def changed(op: str, what: str, **changes: Any) -> tuple[str, dict[str, Any], Tensor]:
        case = RollbackCase("declined", op, geometry, 3, 4, "int32", device, listed=op == "commit")
        case.refill(1)
        arguments = dict(case.arguments())
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return f"{op}: {what}", {**arguments, "op": op}, case.buffer

    def vectors(op: str) -> Sequence[str]:
        extra = {
            "gather": (),
            "restore": ("rejected",),
            "commit": ("accepted", "row_requests", "row_ordinals", "slots", "cursors"),
        }
        return ("pages", "within", "pending", *extra[op])

    for op in ("gather", "restore", "commit"):
        for name in vectors(op):
            yield changed(op, f"{name} is float32", **{name: lambda t: t.float()})
            yield changed(op, f"{name} has two dimensions", **{name: lambda t: t.unsqueeze(0)})
            if device.type == "cuda":
                yield changed(op, f"{name} is on the CPU", **{name: lambda t: t.cpu()})
        yield changed(op, "the index lists differ in length", within=lambda t: t[:-1])
        yield changed(op, "the index lists differ in dtype", within=lambda t: t.long())
        yield changed(op, "the plane table is int32", planes=lambda t: t.int())
        yield changed(op, "the plane table has a plane less", planes=lambda t: t[:-1])
        yield changed(op, "the snapshot has too few rows", old=lambda t: t[:11])
        yield changed(op, "records are too short", old=lambda t: t[:, :3072].contiguous())
        yield changed(op, "records are no multiple of 16", old=lambda t: t[:, :-4].contiguous())
        yield changed(op, "tokens is 0", tokens=0)
        yield changed(op, "tokens is negative", tokens=-4)
    yield changed("restore", "the mask is short", rejected=lambda t: t[:-1])
    yield changed("commit", "the request list is short", row_requests=lambda t: t[:-1])
    yield changed("commit", "only one list is given", row_ordinals=None)
    yield changed(
        "commit",
        "in order, and a request is missing",
        accepted=lambda t: t[:-1],
        row_requests=None,
        row_ordinals=None,
    )
    yield changed(
        "commit",
        "in order, and tokens do not divide the rows",
        tokens=5,
        row_requests=None,
        row_ordinals=None,
    )
    yield changed("commit", "slots and counts differ", slots=lambda t: t[:-1])
    yield changed("commit", "the state table is narrow", states=lambda t: t[:, :-1].contiguous())
