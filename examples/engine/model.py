"""transformers' Qwen3-Next, cut where a decode step touches states and caches.

Rows are ``[N, T, hidden]``: N requests, T tokens each. What the modules compute is theirs; only the
convolution, the recurrence and the attention are left out, for the ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

#: A model of a few layers, small enough for a CPU, in heads that the catalog has.
TINY = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}


def load(where: str, device: torch.device, seed: int = 0, **changes: Any) -> Any:
    """A Qwen3-Next model in bf16: ``tiny`` with random weights and maybe ``changes`` of its config,
    or a checkpoint's directory.
    """
    if where == "tiny":
        torch.manual_seed(seed)
        config = transformers.Qwen3NextConfig(**{**TINY, **changes})
        found = theirs.Qwen3NextForCausalLM(config)
    else:
        found = theirs.Qwen3NextForCausalLM.from_pretrained(where, dtype=torch.bfloat16)
    return found.to(device, torch.bfloat16).eval().requires_grad_(False)


@dataclass(frozen=True)
class Sizes:
    """What the caches and the catalog's cells follow from.

    Attributes
    ----------
    linear, attention
        Indices of the Gated DeltaNet layers and of the attention layers.
    channels
        Channels of the convolution: queries, keys and values of a Gated DeltaNet layer.
    """

    linear: tuple[int, ...]
    attention: tuple[int, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    vocabulary: int

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * 128


@dataclass(frozen=True)
class Mixed:
    """What a Gated DeltaNet layer gives to the convolution and the recurrence.

    Attributes
    ----------
    qkv
        bf16 [N, T, channels], dense: queries, keys, values, before the convolution.
    z
        bf16 [N, T, value_heads, 128]: the gate of the output's norm.
    a, b
        bf16 [N, T, value_heads]: decay and write strength, before their activations.
    """

    qkv: torch.Tensor
    z: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class Attended:
    """What an attention layer gives to the cache and the attention: bf16 [N, T, heads, 256];
    ``gate`` is before the sigmoid.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor


class HybridModel:
    """The parts of a causal LM that are matrix products, norms and activations."""

    def __init__(self, whole: Any) -> None:
        self.whole, self.body, config = whole, whole.model, whole.config
        kinds = config.layer_types[: config.num_hidden_layers]
        self.sizes = Sizes(
            linear=tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
            attention=tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"),
            q_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            vocabulary=config.vocab_size,
        )
        if (config.linear_key_head_dim, config.linear_value_head_dim) != (128, 128):
            raise ValueError("specplan serves Gated DeltaNet layers with heads of 128")

    @property
    def device(self) -> torch.device:
        return self.body.embed_tokens.weight.device

    def layers(self) -> Iterator[tuple[int, Any]]:
        """The layers in order, with their numbers."""
        yield from enumerate(self.body.layers)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """bf16 [N, T, hidden] of int32 [N, T]."""
        return self.body.embed_tokens(ids)

    def rotary(self, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        """The rotary embedding of int32 [N, T] positions."""
        return self.body.rotary_emb(hidden, positions)

    def mix(self, layer: Any, hidden: torch.Tensor) -> Mixed:
        """A Gated DeltaNet layer up to its convolution."""
        mixer = layer.linear_attn
        normed = layer.input_layernorm(hidden)
        q, k, v, z, b, a = mixer.fix_query_key_value_ordering(
            mixer.in_proj_qkvz(normed), mixer.in_proj_ba(normed)
        )
        qkv = torch.cat([x.reshape(*x.shape[:2], -1) for x in (q, k, v)], -1)
        return Mixed(qkv, z, a.contiguous(), b.contiguous())

    def unmix(self, layer: Any, hidden: torch.Tensor, core: torch.Tensor, z: Any) -> torch.Tensor:
        """A Gated DeltaNet layer from the recurrence's output (bf16 [N, T, value_heads, 128]) on,
        the MLP included.
        """
        mixer = layer.linear_attn
        normed = mixer.norm(core.reshape(-1, 128), z.reshape(-1, 128))
        return self._after(layer, hidden + mixer.out_proj(normed.view(*core.shape[:2], -1)))

    def attend(self, layer: Any, hidden: torch.Tensor, rotary: Any) -> Attended:
        """An attention layer up to its cache."""
        mixer, normed = layer.self_attn, layer.input_layernorm(hidden)
        shape = (*normed.shape[:2], -1, mixer.head_dim)
        q, gate = mixer.q_proj(normed).view(*shape[:3], 2 * mixer.head_dim).chunk(2, -1)
        q = mixer.q_norm(q).transpose(1, 2)
        k = mixer.k_norm(mixer.k_proj(normed).view(shape)).transpose(1, 2)
        q, k = theirs.apply_rotary_pos_emb(q, k, *rotary)
        v = mixer.v_proj(normed).view(shape)
        return Attended(q.transpose(1, 2), k.transpose(1, 2), v, gate)

    def unattend(self, layer: Any, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """An attention layer from the gated attention (bf16 [N, T, q_heads, 256]) on, the MLP
        included.
        """
        product = layer.self_attn.o_proj(out.reshape(*out.shape[:2], -1))
        return self._after(layer, hidden + product)

    def _after(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        found = layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden + (found[0] if isinstance(found, tuple) else found)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """bf16 [N * T, vocabulary]."""
        return self.whole.lm_head(self.body.norm(hidden)).flatten(0, 1)

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor, cache: Any, chunk: int = 512) -> tuple[torch.Tensor, Any]:
        """Run tokens (int64 [L]) through the model's own code in chunks, after those in ``cache``
        (None at first); returns the last logits (bf16 [vocabulary]) and the cache.
        """
        if cache is None:
            cache = transformers.DynamicCache(config=self.whole.config)
        given = {self._cache_name: cache}
        for part in ids.split(chunk):
            found = self.whole(part[None], use_cache=True, logits_to_keep=1, **given)
        return found.logits[0, -1], cache

    @property
    def _cache_name(self) -> str:
        import inspect

        names = inspect.signature(theirs.Qwen3NextDecoderLayer.forward).parameters
        return "cache" if "cache" in names else "past_key_values"
