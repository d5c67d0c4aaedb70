"""``pack.conv_verify``: the causal convolution in front of Gated DeltaNet."""

from __future__ import annotations

from typing import Any

import torch
from specplan.errors import InParts, Uncertified
from specplan.op import LoadedPack, Op
from specplan.plans.conv_verify import CONV, EXPORT, IMPORT
from specplan.plans.manifest import PlanRecord


class ConvVerify(Op):
    """The convolution of decode and verify rows over rings of inputs by position; and, as
    ``import_`` and ``export``, the ways between these rings and other servers' windows.
    """

    declared = CONV
    attributes = ("import_", "export")

    def __init__(self, pack: LoadedPack) -> None:
        self.import_: Import = Import(pack).call
        self.export: Export = Export(pack).call
        super().__init__(pack)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        ring: torch.Tensor,
        position: torch.Tensor,
        slot: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> bool | InParts | Uncertified:
        """Launch on torch's current stream.

        Parameters
        ----------
        x
            bf16 [N, T, D], T up to 8: the step's inputs before the convolution. Channels dense,
            strides of N and T multiples of 8 elements, 16-byte aligned; columns of a packed row do.
        weight
            bf16 [D, 4], dense, 16-byte aligned; the last tap is that of the row itself.
        ring
            bf16 [slots, R, D], T + 3 <= R <= 64, strides multiples of 8 elements: the input at
            position p lies at p modulo R. The step's inputs are written. R must stay what it is.
        position
            int32 [N], any stride: the position of each request's first row; negative for padding.
            ``step_setup``'s ``first_position`` is it.
        slot
            int32 [N], any stride: the ring's slot; negative, or not below the ring's slots, for
            padding. Live slots are distinct; nobody checks that.
        out
            bf16 [N, T, D], strides as for x; x itself, or memory apart from it. Zeros for padding.
        bias
            bf16 or fp32 [D].

        Returns
        -------
        True; an :class:`~specplan.InParts`, truthy, if no cell holds all requests and they ran as
        several launches; or a falsy :class:`~specplan.Uncertified`: then nothing was launched. No
        rows: True.

        Raises
        ------
        LaunchError
            CUDA refused the launch.
        ColdCaptureError
            First call on this device, inside a graph capture.

        Example
        -------
        ::

            pack.conv_verify.require(qkv, weight, ring, first_position, slot, qkv)    # in place
            q, k, v = qkv.split([hk * 128, hk * 128, hv * 128], -1)
        """
        raise NotImplementedError  # the function made from the declaration is what is called

    @classmethod
    def idle_arguments(cls, plan: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        """Arguments of a launch that changes nothing of the caller's, to load a plan's code."""
        ops: tuple[type[Op], ...] = (Import, Export)
        for op in ops:
            if op.declared.name == plan.op:
                return op.idle_arguments(plan, device)
        return super().idle_arguments(plan, device)


class Import(Op):
    """Other servers' windows into the rings (see :class:`ConvVerify`)."""

    declared = IMPORT

    def __call__(
        self,
        windows: torch.Tensor,
        ring: torch.Tensor,
        position: torch.Tensor,
        slot: torch.Tensor,
    ) -> bool | Uncertified:
        """Launch on torch's current stream, after a prefill by somebody else's code.

        Parameters
        ----------
        windows
            bf16 [L, M, D, 3], any strides: the last three inputs of each request in each layer, the
            latest last. Of vLLM's [.., L, D] it is the transposed view.
        ring
            bf16 [L, slots, R, D]: the rings of all layers, one tensor or a view of one.
        position
            int32 [M], any stride: the position of the input that comes next. Of a shorter request
            than three, what would lie before position 0 is not moved.
        slot
            int32 [M], any stride; where negative, nothing is moved.

        Returns
        -------
        True, or a falsy :class:`~specplan.Uncertified`; then nothing was launched.
        """
        raise NotImplementedError  # the function made from the declaration is what is called


class Export(Op):
    """The rings into other servers' windows (see :class:`ConvVerify`)."""

    declared = EXPORT

    def __call__(
        self,
        windows: torch.Tensor,
        ring: torch.Tensor,
        position: torch.Tensor,
        slot: torch.Tensor,
    ) -> bool | Uncertified:
        """Launch on torch's current stream; arguments as of :meth:`Import.__call__`, the windows
        written: zeros for positions below 0, nothing where the slot is negative.

        Returns
        -------
        True, or a falsy :class:`~specplan.Uncertified`; then nothing was launched.
        """
        raise NotImplementedError  # the function made from the declaration is what is called
