"""The families that the runtime launches, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from specplan.accept import Accept
from specplan.argmax import Argmax
from specplan.conv_verify import ConvVerify
from specplan.draft_step import DraftStep
from specplan.gather import Gather
from specplan.gdn_replay import GdnReplay
from specplan.op import LoadedPack
from specplan.plans.manifest import PlanRecord
from specplan.rollback import Rollback
from specplan.scatter import Scatter
from specplan.sparse_gqa_verify import SparseGqaVerify
from specplan.stage import Stage
from specplan.step_setup import StepSetup


class RuntimeFamily(Protocol):
    """A family as an attribute of a pack: an op itself, or a holder of ops."""

    def __call__(self, pack: LoadedPack) -> Any:
        """The family of one loaded pack."""
        ...

    def idle_arguments(self, plan: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        """Arguments of a launch that changes nothing of the caller's, to load a plan's code."""
        ...


FAMILIES: Mapping[str, RuntimeFamily] = MappingProxyType(
    {
        "scatter": Scatter,
        "gather": Gather,
        "rollback": Rollback,
        "gdn_replay": GdnReplay,
        "sparse_gqa_verify": SparseGqaVerify,
        "step_setup": StepSetup,
        "stage": Stage,
        "argmax": Argmax,
        "accept": Accept,
        "conv_verify": ConvVerify,
        "draft_step": DraftStep,
    }
)


class Families:
    """The families as attributes of a pack, for editors and type checkers. An op is a function at
    run time; its class has the signature.
    """

    if TYPE_CHECKING:
        scatter: Scatter
        gather: Gather
        rollback: Rollback
        gdn_replay: GdnReplay
        sparse_gqa_verify: SparseGqaVerify
        step_setup: StepSetup
        stage: Stage
        argmax: Argmax
        accept: Accept
        conv_verify: ConvVerify
        draft_step: DraftStep
