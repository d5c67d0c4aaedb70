"""Device code of ``conv_verify``: the causal convolution of width 4 with SiLU in front of Gated
DeltaNet, over rings that hold the inputs of each request by position.

N requests of T rows, D channels, S slots, R places of a ring, T + 3 <= R <= 64; all bf16 but for
the int32 lists and, where it is given so, the bias.

========  ============  ============================================================================
x         [N, T, D]     strides multiples of 16 bytes
weight    [D, 4]        dense; tap 3 is that of the row itself
bias      [D] or [0]    bf16 or fp32
ring      [S, R, D]     strides multiples of 16 bytes; input of position p at p % R; written
position  [N]           any stride: of the request's first row, P
slot      [N]           any stride
out       [N, T, D]     like x, written; x itself, or apart from it
========  ============  ============================================================================

For a request with 0 <= slot < S and P >= 0, inputs before position 0 being zeros::

    out[n, t] = bf16(silu(bias + w0 z[P+t-3] + w1 z[P+t-2] + w2 z[P+t-1] + w3 z[P+t]))
    ring[slot, (P + t) % R] = x[n, t]

in fp32, one FMA a tap in their order, silu(a) = a / (1 + e^-a). All other rows are zeros, and touch
no ring. Accepting or rejecting a row is no work: the next step begins at P plus what was accepted,
finds its three predecessors in place, and writes over the rest. Nothing depends on the batch.

``import_`` and ``export`` move the last three inputs of M requests in all L layers between rings
[L, S, R, D] and windows [L, M, D, 3] of any strides; positions below 0 are neither read nor written
in a ring, and are zeros in a window.

A thread has eight channels of a request, 16 bytes of each row: its three rows of history and its T
rows of x are all in flight before the first is used, and all of x is there before the first row of
``out`` is written. Rows of x are loaded for padding too: they do not wait for slot and position.
Weights are loaded before the wait for earlier grids: nobody writes them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from specplan.kernels import fakes, ranges
from specplan.kernels.device import convert, memory
from specplan.kernels.device.divide import divide31, reciprocal31
from specplan.kernels.device.names import host_name, kernel_name
from specplan.kernels.device.ptx import emit, exp2, select
from specplan.plans.conv_verify import BEFORE, CHANNELS, OPS, TAPS, THREADS
from specplan.plans.plan import Plan

#: log2(e), in two parts: the first is it in fp32.
LOG2_E, LOG2_E_LOW = 1.44269502162933349609375, 1.925963033500e-08
#: Beyond it 2^x need not be a normal number; silu is below 1e-35 there, or a itself.
MOST_POWER = 126.0


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c with one rounding."""
    return emit([Float32], [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")[0]


def silu(a: Float32) -> Float32:
    """a / (1 + e^-a). The power's argument is a product in two parts, so that its relative error
    stays below 2^-20 for every a.
    """
    power = a * Float32(-LOG2_E)
    low = fma(a, Float32(-LOG2_E), Float32(0.0) - power)
    low = fma(a, Float32(-LOG2_E_LOW), low)
    # Beyond, e is infinite or 0, and what is left of the product no number (NaN compares as no).
    beyond = (power > Float32(MOST_POWER)) | (power < Float32(-MOST_POWER))
    low = select(beyond, Float32(0.0), low)
    e = exp2(power) * fma(low, Float32(0.6931471805599453), Float32(1.0))
    return a * cute.arch.rcp_approx(e + Float32(1.0))


def _channels(words: list[Int32]) -> list[Float32]:
    """Eight bf16 of four words, widened."""
    return [f(word) for word in words for f in (convert.bf16_low, convert.bf16_high)]


@kernel_name("conv_verify")
@cute.kernel
def _conv_verify(
    x: cute.Tensor,
    weight: Int64,
    bias_bf16: Int64,
    bias_fp32: Int64,
    ring: cute.Tensor,
    position: cute.Pointer,
    slot: cute.Pointer,
    out: cute.Tensor,
    position_stride: Int32,
    slot_stride: Int32,
    by_places: tuple[Int64, Int32],
    most: cutlass.Constexpr[int],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    part, n, _ = cute.arch.block_idx()
    channel = (part * THREADS + thread) * CHANNELS
    tokens, places = Int32(x.shape[1]), Int32(ring.shape[1])
    here = Boolean(channel < Int32(x.shape[2]))

    taps = [
        _channels(memory.load_read_only(weight + Int64(channel * TAPS * 2 + 16 * i), 4, here))
        for i in range(TAPS)
    ]
    # weight[channel, tap] is number channel * 4 + tap of 32.
    weights = [
        [taps[(c * TAPS + j) // 8][(c * TAPS + j) % 8] for j in range(TAPS)] for c in range(8)
    ]
    has_wide = here & (bias_fp32 != Int64(0))
    wide = memory.load_read_only(bias_fp32 + Int64(channel) * 4, 4, has_wide)
    wide = wide + memory.load_read_only(bias_fp32 + Int64(channel) * 4 + 16, 4, has_wide)
    has_narrow = here & (bias_bf16 != Int64(0))
    narrow = _channels(memory.load_read_only(bias_bf16 + Int64(channel) * 2, 4, has_narrow))
    # One of the two is there, or none; the other's words are zeros.
    bias = [
        select(has_wide, convert.bits_to_float(w), b) for w, b in zip(wide, narrow, strict=True)
    ]

    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    first = memory.load_word(position, Int64(n) * Int64(position_stride))
    at = memory.load_word(slot, Int64(n) * Int64(slot_stride))
    live = here & (at >= 0) & (at < Int32(ring.shape[0])) & (first >= 0)
    rows = [
        memory.load_global(
            memory.element_address(x, n, Int32(t), channel), 4, here & Boolean(t < tokens)
        )
        for t in range(most)
    ]
    start = select(live, first, Int32(0))
    start = start - divide31(start, by_places) * places
    at = select(live, at, Int32(0))
    history = []
    for back in cutlass.range_constexpr(BEFORE, 0, -1):
        place = start - back
        place = select(Boolean(place < 0), place + places, place)
        address = memory.element_address(ring, at, place, channel)
        history.append(memory.load_global(address, 4, live & Boolean(first >= back)))
    window = [_channels(words) for words in history]
    for t in cutlass.range_constexpr(most):
        row = _channels(rows[t])
        values = []
        for c in cutlass.range_constexpr(CHANNELS):
            total = bias[c]
            for j in cutlass.range_constexpr(BEFORE):
                total = fma(weights[c][j], window[j][c], total)
            values.append(silu(fma(weights[c][BEFORE], row[c], total)))
        window = [*window[1:], row]
        there = Boolean(t < tokens)
        zero = Int32(0)
        words = [select(live, w, zero) for w in convert.pack_bf16_pairs(values)]
        memory.store_global(memory.element_address(out, n, Int32(t), channel), words, here & there)
        place = start + t
        place = select(Boolean(place >= places), place - places, place)
        address = memory.element_address(ring, at, place, channel)
        memory.store_global(address, rows[t], live & there)


@kernel_name("conv_import")
@cute.kernel
def _import(
    windows: cute.Tensor,
    ring: cute.Tensor,
    position: cute.Pointer,
    slot: cute.Pointer,
    position_stride: Int32,
    slot_stride: Int32,
    by_places: tuple[Int64, Int32],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    part, m, layer = cute.arch.block_idx()
    channel = part * THREADS + thread
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    first = memory.load_word(position, Int64(m) * Int64(position_stride))
    at = memory.load_word(slot, Int64(m) * Int64(slot_stride))
    places = Int32(ring.shape[2])
    if (channel < Int32(ring.shape[3])) & (at >= 0) & (at < Int32(ring.shape[1])) & (first >= 0):
        start = first - divide31(first, by_places) * places
        for i in cutlass.range_constexpr(BEFORE):
            back = BEFORE - i
            place = start - back
            place = select(Boolean(place < 0), place + places, place)
            if first >= back:
                source = memory.element_address(windows, layer, m, channel, Int32(i))
                target = memory.element_address(ring, layer, at, place, channel)
                store_half(target, load_half(source))


@kernel_name("conv_export")
@cute.kernel
def _export(
    windows: cute.Tensor,
    ring: cute.Tensor,
    position: cute.Pointer,
    slot: cute.Pointer,
    position_stride: Int32,
    slot_stride: Int32,
    by_places: tuple[Int64, Int32],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    part, m, layer = cute.arch.block_idx()
    channel = part * THREADS + thread
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    first = memory.load_word(position, Int64(m) * Int64(position_stride))
    at = memory.load_word(slot, Int64(m) * Int64(slot_stride))
    places = Int32(ring.shape[2])
    if (channel < Int32(ring.shape[3])) & (at >= 0) & (at < Int32(ring.shape[1])) & (first >= 0):
        start = first - divide31(first, by_places) * places
        for i in cutlass.range_constexpr(BEFORE):
            back = BEFORE - i
            place = start - back
            place = select(Boolean(place < 0), place + places, place)
            value = Int32(0)
            if first >= back:
                value = load_half(memory.element_address(ring, layer, at, place, channel))
            store_half(memory.element_address(windows, layer, m, channel, Int32(i)), value)


def load_half(address: Int64) -> Int32:
    """The two bytes at an address, in the lower half of a word."""
    text = "{ .reg .b16 h; ld.global.b16 h, [$1]; cvt.u32.u16 $0, h; }"
    return emit([Int32], [address], text, "=r,l", volatile=True)[0]


def store_half(address: Int64, value: Int32) -> None:
    """Store the lower half of a word."""
    text = "{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }"
    emit([], [address, value], text, "l,r", volatile=True)


def lower(plan: Plan) -> tuple[Any, tuple[Any, ...]]:
    """The host function of a plan and its fake arguments, for ``cute.compile``."""
    op = OPS[plan.op]
    host = _lower_conv(plan) if plan.op == "conv_verify" else _lower_move(plan)
    return host, fakes.arguments(op, plan)


def _lower_conv(plan: Plan) -> Any:
    most = plan.int("most_tokens")

    @host_name("conv_verify")
    @cute.jit
    def conv_verify(
        x: cute.Tensor,
        weight: cute.Tensor,
        bias_bf16: cute.Tensor,
        bias_fp32: cute.Tensor,
        ring: cute.Tensor,
        position: cute.Tensor,
        slot: cute.Tensor,
        out: cute.Tensor,
        launches: Int32,
        stream: Any,
    ) -> None:
        ranges.refuse_unless_declared(
            *(OPS["conv_verify"], plan),
            x=x,
            bias_bf16=bias_bf16,
            bias_fp32=bias_fp32,
            ring=ring,
            out=out,
        )
        if launches > 0:
            narrow = Int64(bias_bf16.shape[0] > 0) * bias_bf16.iterator.toint()
            wide = Int64(bias_fp32.shape[0] > 0) * bias_fp32.iterator.toint()
            _conv_verify(
                x,
                weight.iterator.toint(),
                narrow,
                wide,
                ring,
                position.iterator,
                slot.iterator,
                out,
                Int32(position.stride[0]),
                Int32(slot.stride[0]),
                reciprocal31(Int32(ring.shape[1])),
                most,
            ).launch(
                grid=[cute.ceil_div(x.shape[2], CHANNELS * THREADS), x.shape[0], 1],
                block=[THREADS, 1, 1],
                stream=stream,
                use_pdl=True,
            )

    return conv_verify


def _lower_move(plan: Plan) -> Any:
    kernel = _import if plan.op == "import_" else _export

    @host_name(f"conv_{plan.op.rstrip('_')}")
    @cute.jit
    def move(
        windows: cute.Tensor,
        ring: cute.Tensor,
        position: cute.Tensor,
        slot: cute.Tensor,
        launches: Int32,
        stream: Any,
    ) -> None:
        ranges.refuse_unless_declared(*(OPS[plan.op], plan), ring=ring)
        if launches > 0:
            kernel(
                windows,
                ring,
                position.iterator,
                slot.iterator,
                Int32(position.stride[0]),
                Int32(slot.stride[0]),
                reciprocal31(Int32(ring.shape[2])),
            ).launch(
                grid=[cute.ceil_div(ring.shape[3], THREADS), windows.shape[1], ring.shape[0]],
                block=[THREADS, 1, 1],
                stream=stream,
                use_pdl=True,
            )

    return move
