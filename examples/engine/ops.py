"""Who computes what stands between the model's matrix products: specplan's launches, or the same in
torch.
"""

from __future__ import annotations

from typing import Any, Protocol

import specplan
import torch
from specplan.plans.gdn_replay import Pool

#: Entries of the lists that the attention's problems have.
LIST = 2051


class Ops(Protocol):
    """The ops of a step. All tensors are the caller's; results are written in place."""

    name: str

    def list_of(self, longest: int) -> int:
        """How long the attention's lists are where a context has up to ``longest`` tokens."""
        ...

    def step_setup(self, **named: Any) -> None:
        """See ``pack.step_setup``."""

    def save(self, pages: torch.Tensor, within: torch.Tensor, tokens: int) -> None:
        """Save the rows of the caches that the step overwrites."""

    def convolve(
        self, layer: int, ring: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rows: Any
    ) -> torch.Tensor:
        """The convolution in front of the recurrence; returns bf16 like ``x``."""

    def recur(self, pool: Pool, mixed: Any, qkv: torch.Tensor, mixer: Any, rows: Any) -> Any:
        """The recurrence; returns bf16 [N, T, value_heads, 128]."""

    def attend(self, **named: Any) -> None:
        """See ``pack.sparse_gqa_verify``."""

    def accept(self, **named: Any) -> None:
        """See ``pack.accept``."""

    def put_back(self, pages: torch.Tensor, within: torch.Tensor, n_acc: torch.Tensor) -> None:
        """Restore the caches' rows of rejected tokens."""


class TorchOps:
    """The references, on any device."""

    name = "torch"

    def __init__(self, planes: list[torch.Tensor]) -> None:
        self.planes = planes
        self.saved: list[torch.Tensor] = []
        self.pending = (
            torch.zeros(1, dtype=torch.int32, device=planes[0].device) if planes else None
        )

    def list_of(self, longest: int) -> int:
        return longest

    def step_setup(self, **named: Any) -> None:
        specplan.reference.step_setup(**named)

    def save(self, pages: torch.Tensor, within: torch.Tensor, tokens: int) -> None:
        self.saved = [p.new_empty((len(pages), *p.shape[2:])) for p in self.planes]
        if self.pending is not None:
            specplan.reference.rollback.gather(self.planes, pages, within, self.saved, self.pending)

    def convolve(
        self, layer: int, ring: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rows: Any
    ) -> torch.Tensor:
        return convolve(ring, x, weight, rows.first_position, rows.slots)

    def recur(self, pool: Pool, mixed: Any, qkv: torch.Tensor, mixer: Any, rows: Any) -> Any:
        q, k, v = heads_of(qkv, pool.cursors.geometry)
        out = torch.empty_like(v)
        named = (q, k, v, mixed.a, mixed.b, mixer.A_log.float(), mixer.dt_bias.float())
        specplan.reference.gdn_replay.verify(*named, *pool.tensors, rows.slots, out)
        return out

    def attend(self, **named: Any) -> None:
        out, _ = named.pop("out"), named.pop("tokens")
        out.copy_(specplan.reference.sparse_gqa_verify.attention(**named).out)

    def accept(self, **named: Any) -> None:
        specplan.reference.accept(**named)

    def put_back(self, pages: torch.Tensor, within: torch.Tensor, n_acc: torch.Tensor) -> None:
        if self.pending is None:
            return
        rows = torch.arange(len(pages), device=pages.device, dtype=torch.int32)
        tokens = len(pages) // len(n_acc)
        specplan.reference.rollback.commit(
            *(self.planes, pages, within, self.saved, self.pending),
            *(n_acc, rows // tokens, rows % tokens),
        )


def heads_of(
    qkv: torch.Tensor, geometry: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as views [N, T, heads, 128] of the convolution's channels."""
    keys, values = geometry
    parts = qkv.split([keys * 128, keys * 128, values * 128], -1)
    q, k, v = (part.unflatten(-1, (-1, 128)) for part in parts)
    return q, k, v


def convolve(
    ring: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """The causal convolution of width 4 with SiLU over rings of inputs by position.

    Parameters
    ----------
    ring
        bf16 [slots, R, D], R >= T + 3: the input at position p lies at p modulo R. The step's own
        are written.
    x
        bf16 [N, T, D].
    weight
        bf16 [D, 4]; the last tap is that of the token itself.
    positions, slots
        int32 [N]: position of each request's first row, and its slot; -1 for padding, whose rows
        are zeros.
    """
    size, tokens = ring.shape[1], x.shape[1]
    out = torch.zeros_like(x)
    live = ((slots >= 0) & (positions >= 0)).nonzero().flatten()
    at, first = slots[live].long(), positions[live].long()
    before = first[:, None] - torch.arange(3, 0, -1, device=x.device)
    history = ring[at[:, None], before % size]
    history = torch.where((before >= 0)[..., None], history, 0)
    inputs = torch.cat([history, x[live]], 1).float()
    taps = weight.float()
    total = sum(inputs[:, i : i + tokens] * taps[:, i] for i in range(4))
    out[live] = torch.nn.functional.silu(total).to(x.dtype)
    places = (first[:, None] + torch.arange(tokens, device=x.device)) % size
    ring[at[:, None], places] = x[live]
    return out
