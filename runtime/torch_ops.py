"""The ops as ``torch.ops.specplan.<op>``, for ``torch.compile`` and captured graphs.

Imported on demand; importing it registers one custom op for every op of every family, with the
schema that follows from its declaration::

    import specplan.torch_ops

    specplan.torch_ops.use(pack)            # without it: specplan.load(), at the first call
    torch.ops.specplan.scatter(new, following, lens, drafts, slots, *stores, 0, batch)

An op of one name is called like its family, any other ``family_op``. Parameters are those of the
pack's op in its order, but what is an object there is its parts here, in the object's place:

=================  ==============================================================================
``layout``         ``caches: Tensor[]``, the planes; their table is made here, and kept
``states``         ``pools: Tensor[]``, ``candidates: Tensor[]`` after the caches; may be empty
``pool``           ``state``, ``rec_u``, ``rec_k``, ``rec_G``, ``hist_len``, ``bank``
``cursors``        ``hist_len``, ``bank``, ``key_heads``, ``value_heads``, ``dtype``
``segments``       ``destinations: Tensor[]``, ``offsets: int[]``, a word of the record each
``v_scale_order``  ``v_scale_order: str?``, the value of a ``VScaleOrder``
``out``            ``output``: torch.compile takes a keyword ``out`` for torch's own, and refuses
                   one with strides
=================  ==============================================================================

The tables of ``rollback`` are uploaded when a list of tensors is new, which a capture does not
allow: call once before.

Tensors that an op writes and that are views into one allocation: before torch 2.13 inductor may
copy them from a wrong place of it (seen with 2.11 on a GPU; 2.13 has it right). There each such
tensor needs an allocation of its own, or the call an eager part of the model.

They are the raising form: a declined call raises :class:`~specplan.UncertifiedCell` with the text
of the answer, and nothing is launched. Who commits the histories of ``gdn_replay`` is not asked:
tensors do not say whose cursors they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from specplan.errors import ColdCaptureError
from specplan.loading import load
from specplan.pack import Pack
from specplan.plans.families import SIGNATURES
from specplan.plans.gdn_replay import VERIFY, Cursors, Pool
from specplan.plans.signature import Op, Parameter
from specplan.plans.sparse_gqa_verify import VScaleOrder
from specplan.rollback import describe, describe_states
from specplan.stage import describe as describe_segments

_STATES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_POOL = ("state", "rec_u", "rec_k", "rec_G", "hist_len", "bank")
_CURSORS = ("hist_len", "bank")
#: Parameters of a pack's ops that are made from others here.
_MADE_HERE = ("planes", "states")
#: Parameters of a pack's ops that are called otherwise here.
_RENAMED = {"out": "output"}

_LIBRARY = torch.library.Library("specplan", "DEF")
_USED: list[Pack] = []


def use(pack: Pack) -> None:
    """Launch from this pack from now on."""
    _USED[:] = [pack]


#: Tables of caches and of staged states by where these lie; a server has one of each.
_TABLES: dict[tuple[Any, ...], Any] = {}
_MOST_TABLES = 64


def _table(what: str, tensors: Sequence[torch.Tensor], make: Callable[[], Any]) -> Any:
    """What is made of a list of tensors once, as long as they lie where they lay."""
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    key = (what, *places)
    if key not in _TABLES:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ColdCaptureError(
                f"{what} are new to specplan, and a graph capture is under way; call the op once "
                "before the capture, over the same tensors"
            )
        if len(_TABLES) >= _MOST_TABLES:
            _TABLES.clear()
        _TABLES[key] = make()
    return _TABLES[key]


def _pack() -> Pack:
    if not _USED:
        use(load())
    return _USED[0]


def name_of(op: Op) -> str:
    """The op's name in ``torch.ops.specplan``."""
    return op.name if op.name == op.family else f"{op.family}_{op.name}"


def schema(op: Op) -> str:
    """The op's schema, with what it writes marked."""
    written = {tensor.of for tensor in op.tensors if tensor.written}
    # What objects are made of.
    written |= {"pools", "destinations"}
    if op.name != "gather":
        # What the tables of rollback's ops point to, and no argument says.
        written.add("caches")
    marks = iter(f"a{number}" for number in range(len(op.tensors) + len(_POOL)))
    parts: list[str] = []

    def mark_of(name: str) -> str:
        return f"({next(marks)}!)" if name in written else ""

    for parameter in op.parameters:
        if parameter.keyword and "*" not in parts:
            parts.append("*")
        if parameter.name not in _MADE_HERE:
            states = any(each.name == "states" for each in op.parameters)
            parts += _declared(parameter, mark_of, states)
    return f"{name_of(op)}({', '.join(parts)}) -> ()"


def _declared(parameter: Parameter, mark_of: Callable[[str], str], states: bool) -> Iterator[str]:
    name, optional = parameter.name, parameter.optional
    mark, default = ("?", "=None") if optional else ("", "")

    def tensor(name: str) -> str:
        return f"Tensor{mark_of(name)}{mark} {_RENAMED.get(name, name)}{default}"

    match parameter.kind:
        case "tensor":
            yield tensor(name)
        case "int":
            yield f"SymInt{mark} {name}{default}"
        case "float":
            yield f"float{mark} {name}{default}"
        case "choice":
            yield f"str{mark} {name}{default}"
        case "Layout":
            yield f"Tensor{mark_of('caches')}[] caches"
            if states:
                yield f"Tensor{mark_of('pools')}[] pools"
                yield "Tensor[] candidates"
        case "Segments":
            yield f"Tensor{mark_of('destinations')}[] destinations"
            yield "int[] offsets"
        case "Pool":
            yield from map(tensor, _POOL)
        case "Cursors":
            yield from map(tensor, _CURSORS)
            yield from ("int key_heads", "int value_heads", "str dtype")
        case kind:
            raise NotImplementedError(f"{parameter.name} of kind {kind}")


def _objects(op: Op, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the pack's op from those of the custom op."""
    made: dict[str, Any] = {}
    for parameter in op.parameters:
        name = parameter.name
        match parameter.kind:
            case "Layout":
                caches = given["caches"]
                found = _table("caches", caches, lambda c=caches: describe(c))  # type: ignore[misc]
                made["layout"], made["planes"] = found
            case _ if name == "states":
                made["states"] = _states(given["pools"], given["candidates"])
            case _ if name in made:
                pass
            case "Segments":
                pairs = list(zip(given["destinations"], given["offsets"], strict=True))
                made[name] = describe_segments(pairs)
            case "Pool":
                pool: list[Any] = [given[part] for part in _POOL]
                made[name] = _pool(*pool, verifies=op.name == "verify")  # type: ignore[misc]
            case "Cursors":
                parts = [given[part] for part in _CURSORS]
                heads = {key: given[key] for key in ("key_heads", "value_heads", "dtype")}
                made[name] = Cursors(*parts, **heads)
            case "choice":
                made[name] = None if given[name] is None else VScaleOrder(given[name])
            case _:
                made[name] = given[_RENAMED.get(name, name)]
    return made


def _states(
    pools: Sequence[torch.Tensor], candidates: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    if len(pools) != len(candidates):
        raise ValueError(f"{len(pools)} pools and {len(candidates)} lists of candidates")
    if not pools:
        return None
    pairs = list(zip(pools, candidates, strict=True))
    table: torch.Tensor = _table("states", (*pools, *candidates), lambda: describe_states(pairs))
    return table


def _pool(
    state: torch.Tensor,
    rec_u: torch.Tensor,
    rec_k: torch.Tensor,
    rec_g: torch.Tensor,
    hist_len: torch.Tensor,
    bank: torch.Tensor,
    verifies: bool,
) -> Pool:
    dtype = _STATES.get(state.dtype)
    if dtype is None or state.dim() != 4 or rec_k.dim() != 5:
        raise ValueError(
            f"state is {state.dtype} {tuple(state.shape)} and rec_k {tuple(rec_k.shape)}; expected "
            "bf16 or fp32 [slots, HV, 128, 128] and [slots, HK, 2, 16, 128]"
        )
    heads = {"key_heads": rec_k.shape[1], "value_heads": state.shape[1]}
    cursors = Cursors(hist_len, bank, dtype=dtype, **heads)
    if verifies:
        cursors.claim(VERIFY)
    return Pool(cursors, state, rec_u, rec_k, rec_g)


@cache
def _parameter_names(op: Op) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The custom op's parameters in order, and the defaults of those that have one."""
    arguments = torch._C.parse_schema(f"specplan::{schema(op)}").arguments
    names = tuple(argument.name for argument in arguments)
    return names, {a.name: a.default_value for a in arguments if a.has_default_value()}


def _launch(op: Op) -> Callable[..., None]:
    def launch(*arguments: Any, **named: Any) -> None:
        names, defaults = _parameter_names(op)
        given = {**defaults, **dict(zip(names, arguments, strict=False)), **named}
        target: Any = getattr(_pack(), op.family)
        target = target if op.name == op.family else getattr(target, op.name)
        target.require(**_objects(op, given))

    return launch


def _fake(*arguments: Any, **named: Any) -> None:
    """Nothing is returned, so there is nothing to say of it."""


def _register(ops: Sequence[Op]) -> None:
    # What is passed must lie as it lay: the compiled functions read strides and addresses.
    tags = [torch.Tag.pt2_compliant_tag]
    tags += [getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)]
    for op in ops:
        _LIBRARY.define(schema(op), tags=tuple(tags))
        _LIBRARY.impl(name_of(op), _launch(op), "CompositeExplicitAutograd")
        torch.library.register_fake(f"specplan::{name_of(op)}", _fake, lib=_LIBRARY)


_register([op for ops in SIGNATURES.values() for op in ops.values()])
