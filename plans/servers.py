"""The deployment of a server, from its model's ``config.json`` and the server's own arithmetic.

A person knows the model, the server and its flags; which pages, shards, batch sizes and dtypes the
kernels then meet follows from them. What is derived here is a deployment file
(``specplan.plans.deployment``), so that it can be read, kept and changed. Facts of vLLM 0.33,
SGLang 0.5.23 and TensorRT-LLM.

vLLM gives one attention block as many tokens as make it hold one page of recurrent state, which
holds the convolution's state and the recurrent state of one layer on one rank::

    conv  = (2 * key_heads * key_dim + value_heads * value_dim) / tp * (width - 1 + drafts) * 2
    state = value_heads / tp * value_dim * key_dim * bytes of the state's dtype
    token = 2 * max(kv_heads / tp, 1) * head_dim * bytes of the K/V dtype
    block = 16 * ceil((conv + state) / (16 * token))

A kernel that replays needs its records in that page too (``records``), which makes the block
longer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specplan.plans import deployment as deployments
from specplan.plans import ranges
from specplan.plans.catalog import Catalog
from specplan.plans.deployment import SCHEMA, Answer, Deployment
from specplan.plans.gdn_replay import HEAD, WINDOW

VLLM, SGLANG, TRTLLM = "vllm", "sglang", "trtllm"
SERVERS = (VLLM, SGLANG, TRTLLM)
#: What `auto` and other spellings of servers come to; a name that is not here stays as it is.
DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp8": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
}
#: Bits of an element; NVFP4 has a scale of 8 bits for every 16 elements beside.
BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "fp8_e4m3": 8, "fp8_e5m2": 8, "nvfp4": 4}
#: vLLM's blocks are multiples of this many tokens, and the most tokens of a captured graph, before
#: Blackwell and since.
BLOCK_ALIGNMENT = 16
GRAPH_TOKENS = (512, 1024)
#: The largest batch of SGLang's graphs on a GPU of 90 to 160 GB, below tensor parallel 4 and from
#: there.
SGLANG_GRAPHS = (256, 512)
#: Tokens of a page where the server, not the model, decides.
PAGES = {SGLANG: 64, TRTLLM: 32}


class ModelError(ValueError):
    """A ``config.json`` that cannot be meant."""


@dataclass(frozen=True)
class Linear:
    """The gated delta rule layers of a model."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    #: Dtype of the recurrent state as the model asks for it, or None.
    state_dtype: str | None


@dataclass(frozen=True)
class Attention:
    """The attention layers of a model; ``budget`` and ``ratio`` where rows attend to chosen
    tokens.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    budget: int | None = None
    ratio: int = 1
    index_dim: int = 0

    @property
    def selected(self) -> int:
        """Width of a row's list: the budget, and the tail of its last group."""
        assert self.budget is not None
        return self.budget + self.ratio - 1


@dataclass(frozen=True)
class Model:
    """What a ``config.json`` says of the parts that specplan has kernels for, and which it lacks.

    ``unserved`` has one sentence for each part that specplan has no kernel for.
    """

    name: str
    dtype: str
    linear: Linear | None
    attention: Attention | None
    unserved: tuple[str, ...]


@dataclass(frozen=True)
class Setup:
    """What a server is started with.

    Parameters
    ----------
    server
        ``vllm``, ``sglang`` or ``trtllm``.
    tp
        Tensor parallel ranks.
    kv_dtype, state_dtype
        As the server spells them; ``auto`` is what the model and the server make of it.
    drafts
        Draft tokens a step; a step verifies one more.
    max_requests
        ``--max-num-seqs``, ``--max-running-requests``, ``max_batch_size``.
    page
        Tokens of a K/V page where the server is told; None for what it takes itself.
    records
        vLLM alone: the page of recurrent state also holds the records of ``gdn_replay``.
    """

    server: str
    max_requests: int
    tp: int = 1
    kv_dtype: str = "auto"
    state_dtype: str = "auto"
    drafts: int = 0
    archs: tuple[str, ...] = ("sm_90a",)
    page: int | None = None
    records: bool = False


@dataclass(frozen=True)
class Derived:
    """A deployment file as text (empty if no family of specplan is reached), what to know about it,
    and a sentence for each part of the model that specplan has no kernel for.
    """

    text: str
    notes: tuple[str, ...]
    unserved: tuple[str, ...]
    #: Tokens of a K/V page, where the model's attention is one of specplan's.
    page: int | None = None
    families: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read_config(path: Path) -> Mapping[str, Any]:
    """A ``config.json``, or the one in a model's directory; ModelError if it cannot be read."""
    try:
        path = path / "config.json" if path.is_dir() else path
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ModelError(f"{path}: not a model's config: expected an object")
    return body


def read_model(config: Mapping[str, Any]) -> Model:
    """What a model's config says of its linear and attention layers.

    Raises
    ------
    ModelError
        If a value that is needed is missing or is no positive integer.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ModelError("text_config is not an object")
    name = " ".join(str(text.get("model_type", config.get("model_type", "?"))).split())
    dtype = _dtype(text.get("dtype", text.get("torch_dtype", config.get("dtype", "bfloat16"))))
    unserved: list[str] = []
    linear = _linear(text, name, unserved)
    attention = _attention(text, unserved)
    return Model(name, dtype, linear, attention, tuple(unserved))


def _dtype(name: Any) -> str:
    """A dtype's name as specplan spells it; a name of nobody stays as it is."""
    if not isinstance(name, str) or not re.fullmatch(r"\w{1,32}", name, re.ASCII):
        raise ModelError(f"dtype is {name!r}, expected a word")
    return DTYPES.get(name, name)


def _integer(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = text.get(key, default)
    if type(value) is not int or value < 1:
        raise ModelError(f"{key} is {value!r}, expected a positive integer")
    return value


def _words(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []


def _linear(text: Mapping[str, Any], name: str, unserved: list[str]) -> Linear | None:
    keys = set(text)
    nested = text.get("linear_attn_config")
    if isinstance(nested, Mapping):
        keys |= set(nested)
    if any("kda" in key for key in keys) or "kda" in name:
        unserved.append(
            "its linear layers are Kimi delta attention, with a gate for every channel; gdn_replay "
            "has the gated delta rule, with a gate for every head"
        )
    elif "linear_num_value_heads" in text:
        if text.get("linear_allow_neg_eigval") or text.get("allow_neg_eigval"):
            unserved.append(
                "its gated delta rule has betas up to 2 (allow_neg_eigval); gdn_replay has betas "
                "up to 1"
            )
            return None
        found = Linear(
            _integer(text, "linear_num_key_heads"),
            _integer(text, "linear_num_value_heads"),
            _integer(text, "linear_key_head_dim"),
            _integer(text, "linear_value_head_dim"),
            _integer(text, "linear_conv_kernel_dim"),
            None if (dtype := text.get("mamba_ssm_dtype")) is None else _dtype(dtype),
        )
        if (found.key_dim, found.value_dim) != (HEAD, HEAD):
            unserved.append(
                f"its gated delta rule has heads of {found.key_dim}/{found.value_dim}; gdn_replay "
                f"has heads of {HEAD}"
            )
            return None
        return found
    elif keys & {"mamba_num_heads", "mamba_n_heads", "ssm_state_size", "mamba_d_state"}:
        unserved.append("its linear layers are Mamba2, which specplan has no kernel for")
    elif "linear_attention" in _words(text.get("layer_types")):
        unserved.append(f"its linear layers ({name}) are of a kind that specplan has no kernel for")
    return None


def _attention(text: Mapping[str, Any], unserved: list[str]) -> Attention | None:
    if "kv_lora_rank" in text:
        what = "attends to chosen tokens over" if "index_topk" in text else "is"
        unserved.append(
            f"its attention {what} a latent K/V cache (MLA), which specplan has no kernel for"
        )
        return None
    if "indexer_budget" not in text:
        if text.get("index_topk") or text.get("sparse_attention_config"):
            unserved.append(
                "its sparse attention is of a kind that specplan has no kernel for; "
                "sparse_gqa_verify has tokens chosen in groups by an indexer (indexer_budget)"
            )
        return None
    q_heads = _integer(text, "num_attention_heads")
    types = _words(text.get("layer_types"))
    if types:
        layers = sum(each in ("full_attention", "qwen_sparse_attention") for each in types)
    else:
        layers = _integer(text, "num_hidden_layers") // _integer(text, "full_attention_interval", 1)
    return Attention(
        q_heads,
        _integer(text, "num_key_value_heads"),
        _integer(text, "head_dim"),
        layers,
        _integer(text, "indexer_budget"),
        _integer(text, "indexer_compress_ratio"),
        _integer(text, "indexer_head_dim"),
    )


def kv_heads_of(kv_heads: int, tp: int) -> int:
    """K/V heads of a rank; fewer heads than ranks are replicated."""
    return max(kv_heads // tp, 1)


def record_bytes(linear: Linear, tp: int) -> int:
    """Bytes of one slot's records of ``gdn_replay``: two banks, bf16 vectors and fp32 gates."""
    values, keys = linear.value_heads // tp, linear.key_heads // tp
    return 2 * WINDOW * (2 * HEAD * (values + keys) + 4 * values)


def vllm_block(
    linear: Linear,
    kv_heads: int,
    head_dim: int,
    *,
    tp: int,
    kv_dtype: str,
    state_dtype: str,
    drafts: int,
    records: bool = False,
) -> int:
    """Tokens of one attention block of vLLM; see the module docstring.

    >>> flash = Linear(16, 48, 128, 128, 4, "float32")
    >>> vllm_block(flash, 2, 256, tp=1, kv_dtype="bf16", state_dtype="fp32", drafts=3)
    1600
    """
    channels = 2 * linear.key_heads * linear.key_dim + linear.value_heads * linear.value_dim
    page = channels // tp * (linear.conv_width - 1 + drafts) * 2
    page += linear.value_heads // tp * linear.value_dim * linear.key_dim * BITS[state_dtype] // 8
    if records:
        page += record_bytes(linear, tp)
    elements = 2 * kv_heads_of(kv_heads, tp) * head_dim
    bits = elements * BITS[kv_dtype] + (elements // 16 * 8 if kv_dtype == "nvfp4" else 0)
    return BLOCK_ALIGNMENT * -(-page * 8 // (BLOCK_ALIGNMENT * bits))


def graph_requests(setup: Setup) -> tuple[int, ...]:
    """Batch sizes that the server captures graphs for by default, up to the first that holds
    ``max_requests``: a smaller batch is padded to the next of them.

    None for TensorRT-LLM, whose ``enable_padding`` is off by default: what has no graph of its own
    runs without one, so every size is reachable.
    """
    query = setup.drafts + 1
    if setup.server == TRTLLM:
        return ()
    if setup.server == VLLM:
        blackwell = any(int(arch[3:].rstrip("af")) >= 100 for arch in setup.archs)
        most = min(2 * setup.max_requests * query, GRAPH_TOKENS[blackwell])
        grid = [1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)]
        tokens = {n for n in grid if n <= most} | {n * query for n in grid if n * query <= most}
        # A graph of a verify step holds whole requests.
        sizes = sorted(n // query for n in tokens if n % query == 0)
    else:
        most = min(setup.max_requests, SGLANG_GRAPHS[setup.tp >= 4])
        grid = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), 512]
        if setup.drafts:
            grid = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8)]
            grid += range(272, 513, 16)
        sizes = sorted({n for n in grid if n <= most} | {most})
    enough = next((n for n in sizes if n >= setup.max_requests), sizes[-1])
    return tuple(n for n in sizes if n <= enough)


def derive(config: Mapping[str, Any], setup: Setup) -> Derived:
    """The deployment of a server, from its model's config.

    Raises
    ------
    ModelError
        For a config that cannot be meant, or a setup that the server cannot start with.
    """
    if setup.server not in SERVERS:
        raise ModelError(f"server is {setup.server!r}, expected one of {', '.join(SERVERS)}")
    for name in ("tp", "max_requests"):
        if getattr(setup, name) < 1:
            raise ModelError(f"{name} is {getattr(setup, name)}, expected at least 1")
    if setup.drafts < 0:
        raise ModelError(f"drafts is {setup.drafts}, expected at least 0")
    model = read_model(config)
    kv_dtype = _dtype(setup.kv_dtype)
    kv_dtype = model.dtype if kv_dtype == "auto" else kv_dtype
    notes: list[str] = []
    unserved = list(model.unserved)
    families: dict[str, Mapping[str, Any]] = {}
    page: int | None = None
    if model.linear is not None:
        state = _state_dtype(model, setup)
        _divides("key heads", model.linear.key_heads, setup.tp)
        _divides("value heads", model.linear.value_heads, setup.tp)
        families["gdn_replay"] = {
            "key_heads": model.linear.key_heads // setup.tp,
            "value_heads": model.linear.value_heads // setup.tp,
            "dtype": state,
        }
    if model.attention is not None:
        page = _page(model, setup, kv_dtype, notes, unserved)
    if page is not None:
        families["sparse_gqa_verify"] = _sparse(model, setup, kv_dtype, page, notes)
    if setup.server == TRTLLM and setup.drafts and families:
        families |= _bookkeeping(model, setup)
    if not families and not unserved:
        unserved.append(
            "its attention is dense and it has no linear layers; specplan has kernels for neither "
            "and the server keeps its own"
        )
    elif model.linear is not None and model.attention is None and not model.unserved:
        notes.append("the attention layers are dense: the server keeps its own kernels for them")
    return Derived(
        _spell(model, setup, families, notes), tuple(notes), tuple(unserved), page, families
    )


def answer(
    derived: Derived,
    setup: Setup,
    catalog: Catalog,
    root: Path | Mapping[str, Path],
    evidence: Sequence[Path],
) -> Answer:
    """Whether every cell that the derived server can reach is certified and built; a part of the
    model that specplan has no kernel for is a complaint.
    """
    if not derived.text:
        return Answer(Deployment(setup.archs, (), (), ()), [], derived.unserved)
    wanted = deployments.loads(derived.text, catalog, "the derived deployment")
    found = deployments.answer(wanted, catalog, root, evidence)
    return replace(found, complaints=[*derived.unserved, *found.complaints])


def _divides(what: str, heads: int, tp: int) -> None:
    if heads % tp:
        raise ModelError(f"{heads} {what} do not divide by tensor parallel {tp}")


def _state_dtype(model: Model, setup: Setup) -> str:
    """The model's wish; without one fp32 in SGLang and the model's dtype elsewhere."""
    assert model.linear is not None
    if setup.state_dtype != "auto":
        return _dtype(setup.state_dtype)
    if model.linear.state_dtype is not None:
        return model.linear.state_dtype
    return "fp32" if setup.server == SGLANG else model.dtype


def _page(
    model: Model, setup: Setup, kv_dtype: str, notes: list[str], unserved: list[str]
) -> int | None:
    """Tokens of a K/V page of the layers with chosen tokens; None if the server has none."""
    attention = model.attention
    assert attention is not None
    if setup.page is not None:
        return setup.page
    if setup.server != VLLM:
        notes.append(f"{setup.server} keeps {PAGES[setup.server]} tokens in a page")
        return PAGES[setup.server]
    if kv_dtype == "nvfp4":
        unserved.append("vLLM has no NVFP4 K/V cache for attention to chosen tokens")
        return None
    if model.linear is None:
        notes.append(f"vLLM keeps {BLOCK_ALIGNMENT} tokens in a block unless it is told otherwise")
        return BLOCK_ALIGNMENT
    state = _state_dtype(model, setup)
    for what, dtype in (("K/V", kv_dtype), ("state", state)):
        if dtype not in BITS:
            raise ModelError(f"{what} dtype {dtype!r} has no size here; known: {', '.join(BITS)}")
    block = vllm_block(
        model.linear,
        attention.kv_heads,
        attention.head_dim,
        tp=setup.tp,
        kv_dtype=kv_dtype,
        state_dtype=state,
        drafts=setup.drafts,
        records=setup.records,
    )
    inside = " and the records of gdn_replay" if setup.records else ""
    notes.append(
        f"vLLM keeps {block} tokens in a block: as many as hold one layer's convolution state, "
        f"{state} recurrent state{inside}"
    )
    ring = -(-(attention.ratio + setup.drafts) // attention.ratio) * attention.ratio
    if block % ring:
        notes.append(
            f"vLLM does not start with this: its ring of {ring} raw index keys must divide the "
            f"block of {block} tokens"
        )
    return block


def _sparse(
    model: Model, setup: Setup, kv_dtype: str, page: int, notes: list[str]
) -> Mapping[str, Any]:
    attention = model.attention
    assert attention is not None
    _divides("query heads", attention.q_heads, setup.tp)
    if setup.tp > attention.kv_heads:
        if setup.tp % attention.kv_heads:
            raise ModelError(
                f"tensor parallel {setup.tp} is no multiple of {attention.kv_heads} K/V heads"
            )
        notes.append(f"each K/V head is replicated on {setup.tp // attention.kv_heads} ranks")
    else:
        _divides("K/V heads", attention.kv_heads, setup.tp)
    if setup.server == SGLANG and setup.drafts + 1 > attention.ratio:
        notes.append(
            f"SGLang verifies at most {attention.ratio} tokens a request here, not "
            f"{setup.drafts + 1}"
        )
    return {
        "q_heads": attention.q_heads // setup.tp,
        "kv_heads": kv_heads_of(attention.kv_heads, setup.tp),
        "head_dim": attention.head_dim,
        "page_size": page,
        "selected": attention.selected,
        "dtype": kv_dtype,
    }


def _bookkeeping(model: Model, setup: Setup) -> dict[str, Mapping[str, Any]]:
    """The stores of TensorRT-LLM's sampler, and what it rolls back of its index keys."""
    width = setup.drafts + 1
    found: dict[str, Mapping[str, Any]] = {
        "scatter": {"history": width, "next": width, "draft": setup.drafts},
        "gather": {"next": width, "draft": setup.drafts},
    }
    if model.attention is not None:
        found["rollback"] = {
            "planes": model.attention.layers,
            "row_bytes": 2 * model.attention.index_dim,
            "side_planes": 1,
            "side_row_bytes": 12,
            "dtype": "int32",
        }
    return found


def _spell(
    model: Model, setup: Setup, families: Mapping[str, Mapping[str, Any]], notes: list[str]
) -> str:
    """The deployment file, with what was given as a comment."""
    if not families:
        return ""
    graphs = graph_requests(setup)
    most = setup.max_requests
    if not graphs:
        notes.append("a batch without a graph of its own size runs without one: every size counts")
    elif graphs[-1] < most:
        notes.append(f"batches of {graphs[-1] + 1} to {most} run without a graph, at their size")
    elif graphs[-1] > most:
        notes.append(f"a batch of {most} is padded to the graph of {graphs[-1]}")
        most = graphs[-1]
    given = [f"tp {setup.tp}", f"K/V {setup.kv_dtype}", f"state {setup.state_dtype}"]
    given += [f"{setup.drafts} drafts", f"{setup.max_requests} requests"]
    lines = [
        f"# {model.name} on {setup.server}: {', '.join(given)}. Derived by `specplan coverage`.",
        f"schema: {SCHEMA}",
        f"arch: {_flow(setup.archs)}",
        f"max_requests: {most}",
        f"draft_lengths: [{setup.drafts}]",
    ]
    lines += [f"graph_requests: [{ranges.spell(graphs)}]"] if graphs else ["eager: true"]
    lines.append("families:")
    for family, use in families.items():
        body = ", ".join(f"{key}: {value}" for key, value in use.items())
        lines.append(f"  {family}: {{{body}}}")
    return "\n".join(lines) + "\n"


def _flow(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"
