"""``pack.sparse_gqa_verify``: attention of verify rows over their chosen tokens in a paged K/V
cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from specplan.errors import Uncertified
from specplan.op import Op, required
from specplan.plans import sparse_gqa_verify as planning
from specplan.plans.manifest import PlanRecord
from specplan.plans.sparse_gqa_verify import OP, VScaleOrder, words_of

#: Words of the longest workspace that a compiled function takes.
_MOST_WORDS = (1 << 31) - 1


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

    declared = OP
    names: ClassVar[Mapping[str, Any]] = {
        "VScaleOrder": VScaleOrder,
        "LINEAR": VScaleOrder.LINEAR,
        "INTERLEAVED": VScaleOrder.INTERLEAVED,
    }
    attributes: ClassVar[tuple[str, ...]] = ("workspace", "VScaleOrder")

    #: The orders of NVFP4's V scales.
    VScaleOrder = VScaleOrder

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
        raise NotImplementedError  # the function made from the declaration is what is called

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
        return max(words_of(geometry, pick.cell.requests, pick.launch) for pick in found)

    def adapt_arguments(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Block scales kept as bytes, a gate whose heads are one axis, and a workspace beyond 2^31
        words as the module takes them.
        """
        adapted = {}
        space, gate, q = values["workspace"], values["output_gate"], values["q"]
        if space is not None and space.dim() == 1 and space.numel() > _MOST_WORDS:
            adapted["workspace"] = space[:_MOST_WORDS]
        for name in ("k_block_scales", "v_block_scales"):
            if values[name] is not None and values[name].dtype == torch.uint8:
                adapted[name] = values[name].view(torch.float8_e4m3fn)
        if gate is not None and gate.dim() == 2 and gate.shape[1] == q.shape[1] * q.shape[2]:
            adapted["output_gate"] = gate.unflatten(1, (q.shape[1], q.shape[2]))
        return adapted or None

    @classmethod
    def idle_argument(cls, name: str, plan: PlanRecord, device: torch.device) -> Any:
        """The row is of no request."""
        if name != "request_indices":
            return None
        return torch.full((1,), -1, dtype=torch.int32, device=device)

    @classmethod
    def further_idle_arguments(
        cls, plan: PlanRecord, device: torch.device
    ) -> tuple[tuple[Any, ...], ...]:
        """The same, merged in a cluster: a plan may have a kernel of its own for it."""
        idle = list(cls.idle_arguments(plan, device))
        scalars = [scalar.name for scalar in OP.scalars]
        idle[scalars.index("cluster") - len(scalars)] = 2
        return (tuple(idle),)
