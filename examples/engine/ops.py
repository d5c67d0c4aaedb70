"""Who computes what stands between the model's matrix products: specplan's launches, or the same in
torch.
"""

from __future__ import annotations

from typing import Any, Protocol

import specplan
import torch
from specplan.plans.argmax import vocabulary_class
from specplan.plans.conv_verify import channels_of
from specplan.plans.gdn_replay import Pool

#: Entries of the lists that the attention's problems have.
LIST = 2051


class Ops(Protocol):
    """The ops of a step. All tensors are the caller's; results are written in place."""

    name: str
    captures: bool

    def list_of(self, longest: int) -> int:
        """How long the attention's lists are where a context has up to ``longest`` tokens."""
        ...

    def step_setup(self, **named: Any) -> None:
        """See ``pack.step_setup``."""

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


class TorchOps:
    """The references, on any device."""

    name = "torch"
    #: Whether a step's launches may be captured in a graph.
    captures = False

    def list_of(self, longest: int) -> int:
        return longest

    def step_setup(self, **named: Any) -> None:
        specplan.reference.step_setup(**named)

    def convolve(
        self, layer: int, ring: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rows: Any
    ) -> torch.Tensor:
        lists = (rows.first_position, rows.slots)
        specplan.reference.conv_verify.conv_verify(x, weight, ring, *lists, x)
        return x

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


class PackOps:
    """specplan's launches, on torch's current stream, of a loaded pack."""

    name = "specplan"
    captures = True

    def __init__(self, pack: Any) -> None:
        self.pack = pack
        self._workspaces: dict[int, torch.Tensor] = {}
        self._gates: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def holes(self, sizes: Any, batches: Any, tokens: int, state: str) -> list[str]:
        """What a step of these sizes would be declined for."""
        pack, found = self.pack, []
        heads = {"key_heads": sizes.key_heads, "value_heads": sizes.value_heads}
        attention = {
            "q_heads": sizes.q_heads,
            "kv_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "page_size": 32,
            "selected": LIST,
        }
        wanted: list[tuple[Any, dict[str, Any]]] = [
            (pack.step_setup.pick, {"group": 1, "dtype": "int32"}),
            (pack.accept.pick, {"vocabulary_k": vocabulary_class(sizes.vocabulary)}),
        ]
        if sizes.linear:
            channels = channels_of(sizes.key_heads, sizes.value_heads)
            wanted += [
                (pack.gdn_replay.verify.parts, {**heads, "dtype": state}),
                (pack.conv_verify.parts, {"channels": channels}),
            ]
        if sizes.attention:
            wanted.append((pack.sparse_gqa_verify.pick, {**attention, "dtype": "bf16"}))
        for batch in batches:
            for pick, named in wanted:
                answer = pick(requests=batch, tokens=tokens, **named)
                if isinstance(answer, specplan.Uncertified):
                    found.append(str(answer))
        return found

    def list_of(self, longest: int) -> int:
        return LIST

    def step_setup(self, **named: Any) -> None:
        self.pack.step_setup.require(**named)

    def convolve(
        self, layer: int, ring: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rows: Any
    ) -> torch.Tensor:
        self.pack.conv_verify.require(x, weight, ring, rows.first_position, rows.slots, x)
        return x

    def recur(self, pool: Pool, mixed: Any, qkv: torch.Tensor, mixer: Any, rows: Any) -> Any:
        q, k, v = heads_of(qkv, pool.cursors.geometry)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if id(mixer) not in self._gates:
            self._gates[id(mixer)] = (mixer.A_log.float(), mixer.dt_bias.float())
        gates = (mixed.a, mixed.b, *self._gates[id(mixer)])
        self.pack.gdn_replay.verify.require(pool, q, k, v, *gates, rows.slots, out)
        return out

    def attend(self, **named: Any) -> None:
        q, k, tokens = named["q"], named["k_cache"], named["tokens"]
        words = self.pack.sparse_gqa_verify.workspace(
            q_heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[2],
            page_size=k.shape[2],
            selected=LIST,
            dtype="bf16",
            requests=q.shape[0] // tokens,
            tokens=tokens,
        )
        if words not in self._workspaces:
            self._workspaces[words] = q.new_empty(max(words, 1), dtype=torch.float32)
        space = self._workspaces[words] if words else None
        self.pack.sparse_gqa_verify.require(**named, workspace=space)

    def accept(self, **named: Any) -> None:
        self.pack.accept.require(**named)


def heads_of(
    qkv: torch.Tensor, geometry: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as views [N, T, heads, 128] of the convolution's channels."""
    keys, values = geometry
    parts = qkv.split([keys * 128, keys * 128, values * 128], -1)
    q, k, v = (part.unflatten(-1, (-1, 128)) for part in parts)
    return q, k, v
