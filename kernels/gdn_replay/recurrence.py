"""The recurrence of a head's new tokens: gates, products with state and history, substitution."""

from __future__ import annotations

from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from specplan.kernels.device import convert, memory, ptx
from specplan.kernels.device.mma import mma_bf16
from specplan.kernels.gdn_replay.history import Weights
from specplan.kernels.gdn_replay.tiles import BLOCKS, HistoryKeys, Lane, Operand


def load_gate_inputs(
    token_a: Int64, token_b: Int64, A_log: Int64, dt_bias: Int64, live: Boolean, exists: Boolean
) -> list[Float32]:
    """Load the inputs of a token's gates in one head: a, b, A_log, dt_bias."""
    return [
        memory.load_read_only_bf16(token_a, live),
        memory.load_read_only_bf16(token_b, live),
        convert.bits_to_float(memory.load_read_only(A_log, 1, exists)[0]),
        convert.bits_to_float(memory.load_read_only(dt_bias, 1, exists)[0]),
    ]


def softplus(x: Float32) -> Float32:
    """log(1 + e^x) = max(x, 0) + 2 atanh(e / (2 + e)), e = e^-|x| <= 1: no overflow, relative error
    about 3e-7.
    """
    e = ptx.exp(Float32(0.0) - cute.math.absf(x))
    z = e * cute.arch.rcp_approx(e + Float32(2.0))
    zz = z * z
    series = Float32(1 / 13)
    for odd in (11, 9, 7, 5, 3, 1):
        series = series * zz + Float32(1 / odd)
    return cute.arch.fmax(x, Float32(0.0)) + (z + z) * series


class Gates:
    """beta of the lane's token, and c, the log decay from before token 0 to after that token."""

    def __init__(self, raw: list[Float32], lane: Lane, live: Boolean) -> None:
        zero = Float32(0.0)
        a, b, A_log, dt_bias = raw
        g = zero - ptx.exp(A_log) * softplus(a + dt_bias)
        c = ptx.select(live, g, zero)
        for distance in (1, 2, 4):
            before = cute.arch.shuffle_sync_up(c, 4 * distance, mask_and_clamp=0)
            c = c + ptx.select(lane.token >= distance, before, zero)
        self.c = c
        sigmoid = cute.arch.rcp_approx(Float32(1.0) + ptx.exp(zero - b))
        self.beta = ptx.select(live, sigmoid, zero)


def multiply_keys(
    lane: Lane, X: Operand, records: HistoryKeys
) -> tuple[list[list[Float32]], list[Float32]]:
    """Compute C = X K_hist^T for records 0-7 and 8-15, and M = X k^^T, whose column operand is the
    k^ part of its row operand.
    """
    C = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
    M = [Float32(0.0)] * 4
    bases = records.row_bases(lane)
    for block in range(BLOCKS):
        past = records.load_rows(bases, block)
        for step in range(2):
            row = X.load_fragment(lane, block, step)
            M = mma_bf16(M, row, (row[0], row[2]))
            for half in range(2):
                C[half] = mma_bf16(C[half], row, (past[half][2 * step], past[half][2 * step + 1]))
    return C, M


class Coefficients:
    """Coefficients of a head that are the same for all its value rows and do not need its state.

    ``past``: w o C as two bf16 terms each of a row operand, which the accumulators of C are, lane
    by lane. ``A``, ``B``: the factors of the deltas of tokens 2 quad and 2 quad + 1 in this lane's
    token, for u and for y. ``since``: e^c.
    """

    def __init__(
        self,
        lane: Lane,
        gates: Gates,
        weights: Weights,
        C: list[list[Float32]],
        M: list[Float32],
    ) -> None:
        w = weights.weight
        self.past = [
            convert.split_bf16(C[half][2 * x] * w[2 * half], C[half][2 * x + 1] * w[2 * half + 1])
            for half in range(2)
            for x in range(2)
        ]
        zero = Float32(0.0)
        self.A, self.B = [], []
        for i in range(2):
            s = lane.quad * 2 + i
            decay = ptx.exp(gates.c - cute.arch.shuffle_sync(gates.c, s * 4))
            self.A.append(ptx.select(s < lane.token, gates.beta * decay * M[i], zero))
            self.B.append(ptx.select(s <= lane.token, decay * M[2 + i], zero))
        self.since = ptx.exp(gates.c)
        self.beta = gates.beta
        self.decay = weights.decay


def operand_terms(words: list[Int32]) -> list[list[Int32]]:
    """Eight state elements as column operands: one list of 4 words for bf16, a high and a low one
    for fp32.
    """
    if len(words) == 4:
        return [words]
    values = [convert.bits_to_float(w) for w in words]
    terms = [convert.split_bf16(values[2 * i], values[2 * i + 1]) for i in range(4)]
    return [[t[0] for t in terms], [t[1] for t in terms]]


def multiply_state(
    lane: Lane, X: Operand, read: Callable[[int, int], list[Int32]]
) -> list[list[Float32]]:
    """Compute R = X S0^T for each tile of 8 value rows."""
    R = [[Float32(0.0)] * 4 for _ in range(lane.tiles)]
    for block in range(BLOCKS):
        rows = [X.load_fragment(lane, block, step) for step in range(2)]
        for tile in range(lane.tiles):
            for term in operand_terms(read(tile, block)):
                for step, row in enumerate(rows):
                    R[tile] = mma_bf16(R[tile], row, (term[2 * step], term[2 * step + 1]))
    return R


def add_history(
    R: list[list[Float32]], coefficients: Coefficients, deltas: list[list[Int32]]
) -> list[list[Float32]]:
    """Compute H = e^(G_P) R + (w o C) U_hist."""
    H = []
    for tile, products in enumerate(R):
        acc = [coefficients.decay * x for x in products]
        for term in range(2):
            row = [t[term] for t in coefficients.past]
            acc = mma_bf16(acc, row, (deltas[0][tile], deltas[1][tile]))
        H.append(acc)
    return H


def substitute_forward(
    lane: Lane,
    tokens: int,
    coefficients: Coefficients,
    values: list[Int32],
    H: list[list[Float32]],
) -> tuple[list[Float32], list[Float32]]:
    """Compute u and y of the lane's token, at the lane's value rows, by forward substitution over
    the tokens.
    """
    u, y = [], []
    since, beta = coefficients.since, coefficients.beta
    for tile, acc in enumerate(H):
        v = convert.bf16_low(values[tile]), convert.bf16_high(values[tile])
        for i in range(2):
            u.append(beta * (v[i] - since * acc[i]))
            y.append(since * acc[2 + i])

    row = lane.index & -4
    for s in range(tokens):
        a = cute.arch.shuffle_sync(coefficients.A[s % 2], row + s // 2)
        b = cute.arch.shuffle_sync(coefficients.B[s % 2], row + s // 2)
        reached = lane.token >= s
        for x in range(len(u)):
            known = ptx.select(
                reached, cute.arch.shuffle_sync(u[x], lane.quad + 4 * s), Float32(0.0)
            )
            y[x] = y[x] + b * known
            if s < tokens - 1:
                u[x] = u[x] - a * known
    return u, y
