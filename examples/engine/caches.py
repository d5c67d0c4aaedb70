"""What outlives a step: pages of keys and values, slots of states, and who has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from specplan.plans.gdn_replay import HEAD, WINDOW, Cursors, Pool

from .model import Sizes

#: Tokens of a page; positions of the ring in front of the recurrence.
PAGE, RING = 32, 16
STATES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class OutOf(RuntimeError):
    """There is no free page or slot; a request has to wait, or to be preempted."""


@dataclass
class Free:
    """Numbers that are handed out and come back."""

    what: str
    count: int
    left: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.left = list(reversed(range(self.count)))

    def take(self) -> int:
        """A free number; :class:`OutOf` if there is none."""
        if not self.left:
            raise OutOf(f"no {self.what} is free")
        return self.left.pop()

    def give(self, number: int) -> None:
        """Hand a number back."""
        assert number not in self.left, f"{self.what} {number} is free already"
        self.left.append(number)

    @property
    def used(self) -> int:
        """How many are handed out."""
        return self.count - len(self.left)


class Caches:
    """The tensors of all layers.

    Attributes
    ----------
    k, v
        By attention layer: bf16 [pages, 32, kv_heads, 256]; ``heads_first`` is the view that the
        attention takes. Page 0 belongs to nobody: padding rows write there.
    pools
        By Gated DeltaNet layer: the states and records of ``gdn_replay``.
    rings
        By Gated DeltaNet layer: bf16 [slots, 16, channels], inputs of the convolution by position.
    """

    def __init__(
        self, sizes: Sizes, slots: int, pages: int, device: torch.device, state_dtype: str = "bf16"
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        keys, values = sizes.key_heads, sizes.value_heads
        self.sizes = sizes
        self.slots, self.pages = Free("slot", slots), Free("page", pages)
        assert self.pages.take() == 0
        shape = (pages, PAGE, sizes.kv_heads, sizes.head_dim)
        self.k = {i: zeros(*shape) for i in sizes.attention}
        self.v = {i: zeros(*shape) for i in sizes.attention}
        self.hist_len = zeros(slots, dtype=torch.int32)
        self.bank = zeros(slots, dtype=torch.int32)
        self.cursors = Cursors(
            self.hist_len,
            self.bank,
            key_heads=keys,
            value_heads=values,
            dtype=state_dtype,
        )
        self.pools = {
            i: Pool(
                self.cursors,
                zeros(slots, values, HEAD, HEAD, dtype=STATES[state_dtype]),
                zeros(slots, values, 2, WINDOW, HEAD),
                zeros(slots, keys, 2, WINDOW, HEAD),
                zeros(slots, values, 2, WINDOW, dtype=torch.float32),
            )
            for i in sizes.linear
        }
        self.rings = {i: zeros(slots, RING, sizes.channels) for i in sizes.linear}

    def heads_first(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as [pages, kv_heads, 32, 256] views."""
        return self.k[layer].transpose(1, 2), self.v[layer].transpose(1, 2)

    def clear(self, slot: int) -> None:
        """A slot without a history."""
        self.hist_len[slot] = self.bank[slot] = 0
        for pool in self.pools.values():
            pool.tensors[0][slot].zero_()

    def take_over(self, cache: Any, length: int, slot: int, pages: list[int]) -> None:
        """What the model's own code left of a prefill of ``length`` tokens, into a slot and the
        pages of the first positions.
        """
        for i in self.sizes.attention:
            layer = cache.layers[i]
            for ours, given in ((self.k[i], layer.keys), (self.v[i], layer.values)):
                for number, page in enumerate(pages):
                    part = given[0, :, number * PAGE : min(length, (number + 1) * PAGE)]
                    ours[page, : part.shape[1]] = part.transpose(0, 1)
        self.hist_len[slot] = self.bank[slot] = 0
        for i in self.sizes.linear:
            layer = cache.layers[i]
            # Theirs is [keys, values], ours [values, keys].
            state = _first(layer.recurrent_states)[0].transpose(-1, -2)
            self.pools[i].tensors[0][slot] = state
            inputs = _first(layer.conv_states)[0]
            for back in range(1, min(3, length) + 1):
                self.rings[i][slot, (length - back) % RING] = inputs[:, -back]


def _first(states: Any) -> torch.Tensor:
    return states[0] if isinstance(states, dict) else states
