"""``pack.sparse_gqa_verify``: attention of verify rows over their chosen tokens in a paged K/V
cache.
"""

from __future__ import annotations

from ctypes import c_float
from functools import partial
from math import inf
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from specplan import library
from specplan.forked import watched
from specplan.op import (
    ARGUMENT_ERRORS,
    CALL_ERRORS,
    MOST_REMEMBERED,
    SHAPE_ERRORS,
    Op,
    no_launch,
    required,
)
from specplan.plans import sparse_gqa_verify as planning
from specplan.plans.manifest import PlanRecord
from specplan.plans.sparse_gqa_verify import HEAD_DIM, workspace_words
from specplan.uncertified import Reason, Uncertified

if TYPE_CHECKING:
    from specplan.pack import Pack

_DTYPES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8_e4m3", torch.uint8: "nvfp4"}
#: How many tensors a compiled function takes, and where an NVFP4 one takes its block scales.
_NVFP4_TENSORS = 15
_BLOCK_SCALES = (3, 4)
#: Where the gate stands, from the end.
_GATE = -3
#: The integers of a launch, which come last. Where the words of the workspace, the splits and the
#: cluster stand among all integers, from the end. A call with 0 splits is checked like any other
#: and launches nothing.
_LAUNCH = ("tokens", "group_rows", "splits", "whole_units", "cluster", "apart")
_SPLITS, _CLUSTER = (_LAUNCH.index(name) - len(_LAUNCH) for name in ("splits", "cluster"))
_WORDS = -len(_LAUNCH) - 1
_LINEAR, _INTERLEAVED = planning.VScaleOrder.LINEAR, planning.VScaleOrder.INTERLEAVED
_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn


class SparseGqaVerify(Op):
    """Attention over an already chosen token list per query row, for decode rows and for the verify
    rows of a speculative step, with BF16, FP8 or NVFP4 caches and an optional sigmoid gate.

    Caches are views ``[pages, kv_heads, page_size, 256]`` with any page, head and token strides: an
    NHD cache is passed as ``cache.permute(0, 2, 1, 3)``, a cache whose pages also hold something
    else as a slice of it::

        op = pack.sparse_gqa_verify
        words = max(op.workspace(problem="qsa_24_2", requests=r, tokens=4) for r in range(1, 65))
        workspace = torch.empty(words, device="cuda")           # once
        op.require(
            q, cache[:, 0], cache[:, 1], block_table, selected_tokens, request_indices,
            out, workspace, tokens=4, softmax_scale=1 / 16, output_gate=gate,
        )

    """

    family: ClassVar[str] = "sparse_gqa_verify"
    op: ClassVar[str] = "sparse_gqa_verify"

    #: The orders of NVFP4's V scales.
    VScaleOrder = planning.VScaleOrder

    def __init__(self, pack: Pack) -> None:
        super().__init__(pack)
        # What a call's extents come to: the compiled function, its last integers, and what to pass
        # where no workspace is given. ``_picked`` has the same by what the hot path reads.
        self._admitted: dict[tuple[Any, ...], tuple[Any, tuple[int, ...], Any]] = {}
        self._empty: dict[int, torch.Tensor] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        selected_tokens: torch.Tensor,
        request_indices: torch.Tensor,
        out: torch.Tensor,
        workspace: torch.Tensor | None = None,
        *,
        tokens: int,
        softmax_scale: float,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        k_block_scales: torch.Tensor | None = None,
        v_block_scales: torch.Tensor | None = None,
        v_scale_order: planning.VScaleOrder | None = None,
        valid_count: torch.Tensor | None = None,
        query_positions: torch.Tensor | None = None,
        output_gate: torch.Tensor | None = None,
        splits: int | None = None,
    ) -> bool | Uncertified:
        """Launch on torch's current stream.

        Row n attends the tokens ``selected_tokens[n]`` of request ``request_indices[n]``. An entry
        is passed over if it is negative, if its page is not there, at or beyond ``valid_count[n]``,
        or beyond ``query_positions[n]``; a row with no entry left, or of no request, becomes 0. A
        token counts as often as it stands in the list.

        Parameters
        ----------
        q
            bf16 [rows, q_heads, 256], last stride 1, the others multiples of 8; so are ``out`` and
            ``output_gate``.
        k_cache, v_cache
            bf16 or float8_e4m3fn [pages, kv_heads, page_size, 256], or for NVFP4 uint8 [pages,
            kv_heads, page_size, 128] with the even dimension in the low four bits. Last stride 1,
            the others multiples of 16 bytes.
        block_table
            int32 [requests, columns], any strides: the page of each ``page_size`` tokens, -1 for
            none.
        selected_tokens
            int32 [rows, width], any strides: token positions in the row's request, -1 for none, in
            any order.
        request_indices
            int32 [rows]: the row of the block table, any other value for a row of no request.
        out
            bf16 [rows, q_heads, 256]; every row is written. It overlaps no other argument.
        workspace
            fp32 [>= words of :meth:`workspace`], 16-byte aligned; what it holds does not matter.
            None where no words are needed.
        tokens
            Rows of a request, which stand together where the rows of a request are to be read
            together; any other arrangement is right, too. requests = rows / tokens.
        softmax_scale
            Finite and above 0, in fp32.
        k_scale, v_scale
            fp32 [1], for FP8 and NVFP4: value = stored x block scale x this.
        k_block_scales, v_block_scales
            float8_e4m3fn or uint8 [pages, kv_heads, page_size, 16], for NVFP4, strides like the
            caches'.
        v_scale_order
            :class:`VScaleOrder`, for NVFP4: how V's block scales lie in a page. Interleaved planes
            have token stride 16.
        valid_count, query_positions
            int32 [rows], or None.
        output_gate
            bf16 [rows, q_heads, 256] or [rows, q_heads * 256], before the sigmoid, or None. The
            output is rounded to bf16 before it is gated, and again after.
        splits
            CTAs that share a unit of work; None for the planning rule's.

        Returns
        -------
        True, or a falsy :class:`~specplan.Uncertified`; then nothing was launched. No rows: True.

        """
        # Written out, and by the least that tells the plan: the compiled function compares the
        # sizes that the plan was picked for with the tensors', and checks the ranges.
        error: Exception | None = None
        try:
            element = k_cache.dtype
            function, last, nothing = self._picked[
                q.get_device(), q.numel(), element, tokens, splits
            ]
            if element is _BF16:
                if (
                    k_scale is None
                    and v_scale is None
                    and k_block_scales is None
                    and v_block_scales is None
                    and v_scale_order is None
                ):
                    function(
                        q,
                        k_cache,
                        v_cache,
                        block_table,
                        selected_tokens,
                        request_indices,
                        request_indices if valid_count is None else valid_count,
                        request_indices if query_positions is None else query_positions,
                        q if output_gate is None else output_gate,
                        out,
                        nothing if workspace is None else workspace,
                        softmax_scale,
                        0 if valid_count is None else 1,
                        0 if query_positions is None else 1,
                        0 if output_gate is None else 1,
                        *last,
                    )
                    return True
            elif element is _FP8:
                if k_block_scales is None and v_block_scales is None and v_scale_order is None:
                    function(
                        q,
                        k_cache,
                        v_cache,
                        k_scale,
                        v_scale,
                        block_table,
                        selected_tokens,
                        request_indices,
                        request_indices if valid_count is None else valid_count,
                        request_indices if query_positions is None else query_positions,
                        q if output_gate is None else output_gate,
                        out,
                        nothing if workspace is None else workspace,
                        softmax_scale,
                        0 if valid_count is None else 1,
                        0 if query_positions is None else 1,
                        0 if output_gate is None else 1,
                        *last,
                    )
                    return True
            elif v_scale_order is _LINEAR or v_scale_order is _INTERLEAVED:
                function(
                    q,
                    k_cache,
                    v_cache,
                    k_block_scales,
                    v_block_scales,
                    k_scale,
                    v_scale,
                    block_table,
                    selected_tokens,
                    request_indices,
                    request_indices if valid_count is None else valid_count,
                    request_indices if query_positions is None else query_positions,
                    q if output_gate is None else output_gate,
                    out,
                    nothing if workspace is None else workspace,
                    softmax_scale,
                    0 if valid_count is None else 1,
                    0 if query_positions is None else 1,
                    0 if output_gate is None else 1,
                    0 if v_scale_order is _LINEAR else 1,
                    *last,
                )
                return True
        except CALL_ERRORS as caught:
            error = caught
        made = self._made(
            q,
            k_cache,
            v_cache,
            block_table,
            selected_tokens,
            request_indices,
            out,
            workspace,
            tokens,
            softmax_scale,
            k_scale,
            v_scale,
            k_block_scales,
            v_block_scales,
            v_scale_order,
            valid_count,
            query_positions,
            output_gate,
            splits,
        )
        if not made:
            return made if made is not None else True
        function, tensors, scalars = made
        # With all of it found good, a refusal of ranges is a failed launch.
        refusal = error if isinstance(error, ARGUMENT_ERRORS) else None
        answer = self._launched(function, tensors, scalars, scalars, refusal)
        return answer if isinstance(answer, Uncertified) else True

    def bind(self, *arguments: Any, **named: Any) -> Any:
        """Check and convert the arguments of a call once; returns ``launch()`` for these buffers,
        or a falsy Uncertified.
        """
        made = self._made(*self._values(arguments, named))
        if not made:
            return made if made is not None else no_launch
        function, tensors, scalars = made
        idle = (*scalars[:_SPLITS], 0, *scalars[_SPLITS + 1 :])
        fitted = self._launched(function, tensors, scalars, idle)
        if isinstance(fitted, Uncertified):
            return fitted
        function, tensors = fitted
        # The first stays torch's: that is how a launch learns torch's current stream.
        convert = library.tvm_ffi().from_dlpack
        return watched(partial(function, tensors[0], *map(convert, tensors[1:]), *scalars))

    def workspace(
        self,
        *,
        requests: int,
        tokens: int,
        problem: str | None = None,
        splits: int | None = None,
        dtype: str | None = None,
        arch: str | None = None,
        **geometry: int,
    ) -> int:
        """fp32 words that a call of this size needs as its workspace, 0 where nothing is split or
        splits merge in clusters; the parameters are those of :meth:`pick`, but without a dtype the
        words are enough for each that the pack has. Looks at no tensor and at no GPU.

        A larger call may need less: a server takes the largest over the sizes that it launches.

        Raises
        ------
        UncertifiedCell
            The call would be declined.
        """
        picks = [
            self.pick(
                requests=requests,
                tokens=tokens,
                problem=problem,
                splits=splits,
                dtype=each,
                arch=arch,
                **geometry,
            )
            for each in ((dtype,) if dtype is not None else planning.FAMILY.dtypes)
        ]
        found = [pick for pick in picks if pick] or [required(picks[0])]
        if problem is not None:
            geometry = dict(self._pack.manifest(arch).problems[self.family][problem])
        return max(_words(geometry, pick.cell.requests, pick.launch) for pick in found)

    def _made(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        selected_tokens: torch.Tensor,
        request_indices: torch.Tensor,
        out: torch.Tensor,
        workspace: torch.Tensor | None,
        tokens: int,
        softmax_scale: float,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        k_block_scales: torch.Tensor | None,
        v_block_scales: torch.Tensor | None,
        v_scale_order: planning.VScaleOrder | None,
        valid_count: torch.Tensor | None,
        query_positions: torch.Tensor | None,
        output_gate: torch.Tensor | None,
        splits: int | None,
    ) -> Any:
        """(function, tensors, scalars), an Uncertified, or None if there are no rows; every check
        that the compiled function makes of ranges is made here, too, and says what it found.
        """
        device = -1
        try:
            device = q.get_device()
            key: tuple[Any, ...]
            key = (device, q.shape, k_cache.shape, k_cache.dtype, selected_tokens.shape[1], tokens)
            if splits is not None:
                key = (*key, splits)
            found = self._admitted.get(key)
            if found is None:
                found = self._first(key, splits)
                if not found:
                    return found
            function, last, nothing = found
            words, dtype = last[_WORDS], _DTYPES[k_cache.dtype]
            self._remember((device, q.numel(), k_cache.dtype, tokens, splits), found)
            wrong = None
            scales: tuple[Any, ...] = ()
            order: tuple[int, ...] = ()
            if dtype == "bf16":
                if k_scale is not None or v_scale is not None:
                    wrong = "bf16 caches have no k_scale and v_scale"
                elif k_block_scales is not None or v_block_scales is not None:
                    wrong = "bf16 caches have no block scales"
            elif k_scale is None or v_scale is None:
                wrong = f"{dtype} caches need k_scale and v_scale"
            elif dtype == "fp8_e4m3":
                scales = (k_scale, v_scale)
                if k_block_scales is not None or v_block_scales is not None:
                    wrong = "FP8 caches have no block scales"
            elif k_block_scales is None or v_block_scales is None:
                wrong = "NVFP4 caches need k_block_scales and v_block_scales"
            elif v_scale_order is planning.VScaleOrder.LINEAR:
                scales, order = (k_block_scales, v_block_scales, k_scale, v_scale), (0,)
            elif v_scale_order is planning.VScaleOrder.INTERLEAVED:
                scales, order = (k_block_scales, v_block_scales, k_scale, v_scale), (1,)
                if v_block_scales.stride(2) != 16:
                    wrong = (
                        "interleaved V scales have token stride 16, these have "
                        f"{v_block_scales.stride(2)}"
                    )
            else:
                wrong = (
                    f"v_scale_order is {v_scale_order!r}; NVFP4 caches need VScaleOrder.LINEAR or "
                    "VScaleOrder.INTERLEAVED"
                )
            if dtype != "nvfp4" and v_scale_order is not None:
                wrong = f"v_scale_order is for NVFP4 caches, these are {dtype}"
            # In fp32, which is what a kernel gets: 1e39 is infinite there, and 1e-50 is 0.
            if not (0 < softmax_scale < inf and 0 < c_float(softmax_scale).value < inf):
                wrong = f"softmax_scale is {softmax_scale}, it must be finite and above 0 in fp32"
            if wrong is not None:
                return self._declined(Reason.ARGUMENT, wrong, device)
            given = 0 if workspace is None else workspace.numel()
            if given < words:
                detail = f"the workspace has {given} words, the call needs {words}"
                return self._declined(Reason.RANGE, detail, device)
            space: torch.Tensor = nothing if workspace is None else workspace
            tensors = (
                q,
                k_cache,
                v_cache,
                *scales,
                block_table,
                selected_tokens,
                request_indices,
                request_indices if valid_count is None else valid_count,
                request_indices if query_positions is None else query_positions,
                q if output_gate is None else output_gate,
                out,
                space,
            )
            # What is no tensor is for the compiled module to refuse.
            inputs = tuple(t for t in tensors[:-2] if isinstance(t, torch.Tensor))
            if _overlaps(out, inputs) or (words and _overlaps(out, (space,))):
                wrong = "out overlaps the memory of another argument"
            elif words and _overlaps(space, inputs):
                wrong = "the workspace overlaps the memory of another argument"
            elif _folded(out):
                wrong = f"rows of out share memory, its strides are {out.stride()}"
            if wrong is not None:
                return self._declined(Reason.ARGUMENT, wrong, device)
        except (*SHAPE_ERRORS, OverflowError) as error:
            return self._refused(error, device)
        flags = (valid_count is not None, query_positions is not None, output_gate is not None)
        return function, tensors, (softmax_scale, *map(int, flags), *order, *last)

    def _first(self, key: tuple[Any, ...], splits: int | None) -> Any:
        """What a first call of its extents comes to: an entry of ``_admitted``, an Uncertified, or
        None if there are no rows.
        """
        device, query, cache, element, width, tokens = key[:6]
        try:
            tokens = index(tokens)
        except TypeError as error:
            return self._refused(error, device)
        if tokens < 1:
            return self._declined(Reason.RANGE, f"tokens is {tokens}, below 1", device)
        if len(query) != 3 or len(cache) != 4:
            detail = f"q is {tuple(query)} and the caches are {tuple(cache)}; expected 3 and 4 axes"
            return self._declined(Reason.ARGUMENT, detail, device)
        rows, q_heads, head_dim = query
        if element not in _DTYPES:
            detail = f"the caches are {element}; expected {', '.join(map(str, _DTYPES))}"
            return self._declined(Reason.ARGUMENT, detail, device)
        if rows == 0:
            return None
        if rows % tokens:
            detail = f"{rows} rows are no multiple of {tokens} tokens a request"
            return self._declined(Reason.RANGE, detail, device)
        geometry = (q_heads, cache[1], head_dim, cache[2], width)
        dtype, requests = _DTYPES[element], rows // tokens
        picked = self._chosen(device, geometry, dtype, requests, tokens, splits)
        if isinstance(picked, Uncertified):
            return picked
        launch = picked.launch
        named = dict(zip(_GEOMETRY, geometry, strict=True))
        words = _words(named, requests, launch)
        sizes = (requests, q_heads, cache[1], cache[2], width, words)
        if len(self._admitted) >= MOST_REMEMBERED:
            self._admitted.clear()
        found = (
            picked.function,
            (*sizes, *(launch[name] for name in _LAUNCH)),
            self._nothing_of(device) if words == 0 else None,
        )
        self._admitted[key] = found
        return found

    def _nothing_of(self, device: int) -> torch.Tensor:
        empty = self._empty.get(device)
        if empty is None:
            empty = self._empty[device] = torch.empty(0, device=device)
        return empty

    def _fit(
        self, function: Any, tensors: tuple[torch.Tensor, ...], integers: tuple[Any, ...]
    ) -> tuple[Any, tuple[torch.Tensor, ...]] | Uncertified | None:
        """Block scales kept as bytes, a gate whose heads are one axis, and a workspace beyond 2^31
        words as the module takes them.
        """
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return None
        fitted = list(tensors)
        if tensors[-1].numel() >= 1 << 31 and tensors[-1].dim() == 1:
            fitted[-1] = tensors[-1][: integers[_WORDS]]
        if len(tensors) == _NVFP4_TENSORS:
            for at in _BLOCK_SCALES:
                if tensors[at].dtype == torch.uint8:
                    fitted[at] = tensors[at].view(torch.float8_e4m3fn)
        if tensors[_GATE].dim() == 2:
            q = tensors[0]
            try:
                fitted[_GATE] = tensors[_GATE].unflatten(1, (q.shape[1], q.shape[2]))
            except RuntimeError:
                return None
        if all(a is b for a, b in zip(fitted, tensors, strict=True)):
            return None
        return function, tuple(fitted)

    @classmethod
    def idle_arguments(cls, plan: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        """A row of no request, split in two and merged in memory; it writes only buffers of its
        own.
        """
        dtype = dict(plan.spec)["dtype"]

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def e4m3(*shape: int) -> torch.Tensor:
            return zeros(*shape, dtype=torch.uint8).view(torch.float8_e4m3fn)

        q = zeros(1, 1, HEAD_DIM, dtype=torch.bfloat16)
        cache = (1, 1, 4, HEAD_DIM)
        scales: tuple[torch.Tensor, ...] = ()
        if dtype == "bf16":
            k = zeros(*cache, dtype=torch.bfloat16)
        elif dtype == "fp8_e4m3":
            k = e4m3(*cache)
        else:
            k = zeros(1, 1, 4, HEAD_DIM // 2, dtype=torch.uint8)
            scales = (e4m3(1, 1, 4, HEAD_DIM // 16),) * 2
        if dtype != "bf16":
            scales += (torch.ones(1, device=device),) * 2
        geometry = {"q_heads": 1, "kv_heads": 1}
        words = workspace_words(geometry, 1, 1, 1, 2, 0)
        nobody = zeros(1) - 1
        return (
            q,
            k,
            k,
            *scales,
            zeros(1, 1),
            zeros(1, 1),
            nobody,
            nobody,
            nobody,
            q,
            zeros(1, 1, HEAD_DIM, dtype=torch.bfloat16),
            zeros(words, dtype=torch.float32),
            1.0,
            *(0, 0, 0),
            *((0,) if dtype == "nvfp4" else ()),
            *(1, 1, 1, 4, 1, words),
            *(1, 1, 2, 0, 1, 0),
        )

    @classmethod
    def further_idle_arguments(
        cls, plan: PlanRecord, device: torch.device
    ) -> tuple[tuple[Any, ...], ...]:
        """The same, merged in a cluster: a plan may have a kernel of its own for it."""
        idle = cls.idle_arguments(plan, device)
        return ((*idle[:_CLUSTER], 2, *idle[_CLUSTER + 1 :]),)


_GEOMETRY = ("q_heads", "kv_heads", "head_dim", "page_size", "selected")


def _words(geometry: Any, requests: int, launch: Any) -> int:
    return workspace_words(
        geometry,
        requests,
        launch["tokens"],
        launch["group_rows"],
        launch["splits"],
        launch["whole_units"],
        launch["cluster"],
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the one after the last of a strided tensor; an empty one has none."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _overlaps(tensor: torch.Tensor, others: tuple[torch.Tensor, ...]) -> bool:
    """Whether the range of a tensor's bytes meets that of another; views that interleave meet."""
    first, end = _span(tensor)
    return any(first < b and a < end for a, b in map(_span, others))


def _folded(tensor: torch.Tensor) -> bool:
    """Whether two indices of a strided tensor may mean one element."""
    axes = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    reach = 1
    for stride, extent in axes:
        if extent > 1:
            if stride < reach:
                return True
            reach = stride * extent
    return False
