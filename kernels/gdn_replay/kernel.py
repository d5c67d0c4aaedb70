"""Device code of ``gdn_replay``: verify over a checkpoint plus records, and the ops that move them.

Verify, for a row of the batch with slot s >= 0, P = hist_len[s], c = bank[s] (``reference.py`` has
the tensor table and the mathematics):

1. X = [k^; q^], normalised and rounded once to bf16: the 16-row operand of every product. Tokens
   from T on are zero rows.
2. C = X K_hist^T (16 x 16) and M = X k^^T (16 x 8).
3. H = e^(G_P) X S0^T + (w o C) U_hist with w_j = e^(G_P - G_j). The weighted C enters as two bf16
   terms, and so does a state of 32 bits.
4. u_t = beta_t (v_t - e^(c_t) H_k(t)) - sum_(s<t) A_ts u_s, by forward substitution over the lanes
   that hold the tokens; y_t = e^(c_t) H_q(t) + sum_(s<=t) e^(c_t - c_s) (q^_t.k^_s) u_s. All fp32.
5. out <- y. Records u, k^, G <- rows P.. of bank c, or rows 0.. of bank 1-c where the row commits
   (P + T > 16).
6. Where the row commits, state <- e^(G_P) S0 + (w o U_hist)^T K_hist: S0 from shared memory, the
   weighted u as two bf16 terms, one rounding.

Nothing else is written: live records, cursors, checkpoints of other rows, slots without a row. A
row with slot -1 writes zeros to ``out``. Dead records are not loaded, decays are exponentials of
differences <= 0, masks are selects. A result depends on the row's own inputs alone, bit for bit:
not on slot numbers, row order, the batch, or how a plan shares the work.

How the work is shared. A warp owns ``rows`` value rows of a head, and its products chain in
registers: value rows and columns are permuted so that a lane's operands and results are consecutive
in memory, the accumulators of C are the row operand of (w o C) U_hist, and the fold's results
belong to the state elements that the lane read. Only the substitution shuffles. A CTA is ``warps``
warps; they share X and K_hist in shared memory, where each warp also has two buffers for its tiles
of the state. ``128 // (rows * warps)`` CTAs, the plan's splits, share a head.

Compiled functions, with their positional arguments. The module checks dtypes, ranks, alignment,
dense and unit strides, 128, 16 and 2, and that N, T, HK, HV and slots agree between arguments.
Batch strides are 32-bit, slot strides 64-bit. A function without rows must not be called.

``verify(q, k, v, a, b, A_log, dt_bias, state, rec_u, rec_k, rec_G, hist_len, bank, slot, out,
scale, ctas)``
    q, k [N, T, HK, 128] and v, out [N, T, HV, 128] bf16: 16-byte aligned, strides of N and T
    multiples of 8 elements; a, b [N, T, HV] bf16, any strides of N and T; A_log, dt_bias [HV] fp32;
    state [slots, HV, 128, 128] bf16 or fp32; rec_u [slots, HV, 2, 16, 128] and rec_k
    [slots, HK, 2, 16, 128] bf16; rec_G [slots, HV, 2, 16] fp32: dense within a slot, slot strides
    multiples of 16 bytes (rec_G: any); hist_len, bank [slots] int32; slot [N] int32, any stride;
    scale float; ctas int32, from the plan's launch parameters and at least its splits.
    The caller checks: N, T >= 1; T <= the plan's ``tokens``; HV is a multiple of HK; live slots are
    unique and below slots; hist_len in 0..16, bank 0 or 1.
``advance(hist_len, bank, slot, n_acc, tokens)``
    n_acc [N] int32, any stride; tokens int32, the T of the verify launch. The caller checks:
    1 <= tokens <= 16, 0 <= n_acc <= tokens, N >= 1.
``materialize(state, rec_u, rec_k, rec_G, bank, src, dst, count)``
    src, dst, count [N] int32, any stride. state[dst] <- the state of src after the first ``count``
    records of its bank; src = dst folds in place; a negative src or dst does nothing. The caller
    checks: 0 <= count <= hist_len[src]; no dst is another row's src or dst; HV is a multiple of HK.
``reset(hist_len, bank, slot)``
    hist_len, bank <- 0 at the slots >= 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor
from cutlass.runtime import make_fake_stream
from specplan.kernels.gdn_replay import ptx
from specplan.plans.plan import Plan

HEAD = 128
WINDOW = 16
LANES = 32
NORM_EPS = 1e-6
STATE = {"bf16": BFloat16, "fp32": Float32}
#: Blocks of 32 elements of a 128-long row: a lane holds 8 consecutive elements of each, at 8 *
#: (lane % 4).
BLOCKS = 4
#: Records that a lane holds of the sixteen, counted from 2 * (lane % 4).
RECORD = (0, 1, 8, 9)
#: One bank of one head's rec_u or rec_k.
BANK_BYTES = WINDOW * HEAD * 2


def element_address(tensor: cute.Tensor, *coordinates: Int32) -> Int64:
    """Address of an element (of the first one, in dimensions that are left out). Slot times stride
    needs 64 bits.
    """
    offset = Int64(0)
    for coordinate, stride in zip(coordinates, tensor.stride, strict=False):
        offset = offset + Int64(coordinate) * Int64(stride)
    return tensor.iterator.toint() + offset * (tensor.element_type.width // 8)


class Lane:
    """Who this lane is in the m16n8k16 layout, and where its elements lie.

    Row of the operand X: token ``token`` (k^ in row token, q^ in row token + 8). Column of a warp's
    tile i of 8 value rows: value row ``2 tiles (token // 2) + 2 i + token % 2``, so that a lane's
    accumulators of all tiles, columns 2 quad and 2 quad + 1, are ``2 tiles`` consecutive value rows
    from ``2 tiles quad`` on: one vector access.
    """

    def __init__(self, lane: Int32, tiles: int) -> None:
        self.index = lane
        self.token = lane >> 2
        self.quad = lane & 3
        self.odd = self.token & 1
        self.tiles = tiles
        self.operand_row = (self.token >> 1) * (2 * tiles)
        self.result_row = self.quad * (2 * tiles)
        #: Takes the lower or the upper halves of two words, by the parity of this lane's column.
        self.pair = ptx.select(self.odd == 1, Int32(0x7632), Int32(0x5410))

    def columns(self, first: list[Int32], second: list[Int32]) -> list[Int32]:
        """This lane's column out of two record rows, one word of (first, second) per tile."""
        return [ptx.permute(x, y, self.pair) for x, y in zip(first, second, strict=True)]


def swizzle(row: Int32) -> Int32:
    """Exchanges the 16-byte chunks of a 256-byte row so that both ways of reading (two neighbouring
    rows over four chunks; four rows of one parity at one chunk) hit every bank once."""
    return ((row & 1) << 2) | ((row >> 1) & 3)


class Shared16:
    """A 16 x 128 bf16 operand in shared memory, used by all warps of a CTA."""

    BYTES = 16 * HEAD * 2

    def __init__(self, start: Int32) -> None:
        self.start = start

    def chunk(self, row: Int32, chunk: Int32) -> Int32:
        return self.start + row * (HEAD * 2) + (chunk ^ swizzle(row)) * 16

    def row_bases(self, lane: Lane) -> tuple[Int32, Int32]:
        """Addresses of the lane's chunks of blocks 0 and 1 in row ``token``; row ``token + 8`` is
        2048 bytes on.
        """
        row = self.start + lane.token * (HEAD * 2) + (lane.quad ^ (lane.token >> 1)) * 16
        return row + lane.odd * 64, row + (1 - lane.odd) * 64

    @staticmethod
    def rows(bases: tuple[Int32, Int32], block: int) -> tuple[list[Int32], list[Int32]]:
        """The lane's 8 elements of block ``block``, of rows ``token`` and ``token + 8``."""
        at, offset = bases[block % 2], (block // 2) * 128
        return ptx.load_shared(at, offset), ptx.load_shared(at, offset + 8 * HEAD * 2)

    def columns(self, lane: Lane, half: Int32, block: int) -> tuple[list[Int32], list[Int32]]:
        """Block ``2 half + block`` as column operands: per tile of 8 columns, the words of rows (0,
        1) and (8, 9) from 2 quad on.
        """
        at = self.start + lane.quad * (2 * HEAD * 2) + ((lane.token >> 1) ^ lane.quad) * 16
        at = at + half * 128
        even, odd = block * 64, HEAD * 2 + (block ^ 1) * 64
        first = lane.columns(ptx.load_shared(at, even), ptx.load_shared(at, odd))
        down = 8 * HEAD * 2
        second = lane.columns(ptx.load_shared(at, even + down), ptx.load_shared(at, odd + down))
        return first, second


class Operand:
    """X = [k^; q^] in shared memory in the order in which lanes hold it: 16 bytes a lane are the
    four registers of a row operand.

    Fragment f = 2 block + step covers the elements 32 block + 8 quad + 4 step + {0..3} of a lane's
    rows ``token`` (k^) and ``token + 8`` (q^), as words (k, q, k, q).
    """

    BYTES = 16 * HEAD * 2

    def __init__(self, start: Int32) -> None:
        self.start = start

    def fragment(self, lane: Lane, block: int, step: int) -> list[Int32]:
        return ptx.load_shared(self.start + lane.index * 16, (2 * block + step) * (LANES * 16))


class Share:
    """This thread's share of making X: one token, and of its k and q the same 16-byte chunks."""

    def __init__(self, thread: Int32, warps: int) -> None:
        self.threads = min(warps * LANES // 8, 2 * HEAD // 16)  # of one token
        self.token = thread // self.threads % 8  # from 128 threads on, two make the same
        self.first = thread % self.threads
        self.chunks = range(0, 2 * HEAD // 16, self.threads)
        self.plane = warps * LANES * 16  # bytes of one chunk of every thread

    def load(self, row: Int64, live: Boolean) -> list[list[Int32]]:
        start = row + Int64(self.first * 16)
        return [ptx.load_constant(start + Int64(chunk * 16), 4, live) for chunk in self.chunks]

    def request(self, to: Int32, row: Int64, live: Boolean) -> None:
        """``load`` by way of shared memory that this thread has for itself."""
        start = row + Int64(self.first * 16)
        for i, chunk in enumerate(self.chunks):
            ptx.copy_async_or_zero(to + i * self.plane, start + Int64(chunk * 16), live)

    def take(self, at: Int32) -> list[list[Int32]]:
        """What was requested, once this thread has waited for it."""
        return [ptx.load_shared(at, i * self.plane) for i in range(len(self.chunks))]


def normalize(share: Share, raw: list[list[Int32]], scale: Float32) -> list[list[Int32]]:
    """x * rsqrt(sum x^2 + eps) * scale, rounded once to bf16. A row without a token is zeros."""
    totals = []
    for chunk in raw:
        total = Float32(0.0)
        for word in chunk:
            x, y = ptx.low(word), ptx.high(word)
            total = total + x * x
            total = total + y * y
        for distance in (1, 2, 4, 8):
            if distance < share.threads:
                total = total + ptx.shuffle_xor(total, distance)
        totals.append(total)
    # chunks of one thread are 8 apart: the order of the sum does not depend on the number of
    # threads
    total = totals[0] if len(totals) == 1 else totals[0] + totals[1]
    factor = ptx.rsqrt(total + Float32(NORM_EPS)) * scale
    return [[ptx.pack(ptx.low(w) * factor, ptx.high(w) * factor) for w in chunk] for chunk in raw]


def store_operand(
    X: Operand,
    share: Share,
    keys: list[list[Int32]],
    queries: list[list[Int32]],
    record: Int64,
    writes: Boolean,
) -> None:
    """To shared memory, and the keys to their record, which is the operand bit for bit."""
    for chunk, k, q in zip(share.chunks, keys, queries, strict=True):
        at = share.first + chunk
        lane = share.token * 4 + (at & 3)
        to = X.start + (at >> 2) * (2 * LANES * 16) + lane * 16
        ptx.store_shared(to, [k[0], q[0], k[1], q[1]])
        ptx.store_shared(to + LANES * 16, [k[2], q[2], k[3], q[3]])
        ptx.store(record + Int64(at * 16), k, writes)


def softplus(x: Float32) -> Float32:
    """log(1 + e^x) = max(x, 0) + 2 atanh(e / (2 + e)), e = e^-|x| <= 1: no overflow, relative error
    about 3e-7.
    """
    e = ptx.exp(Float32(0.0) - ptx.magnitude(x))
    z = e * ptx.reciprocal(e + Float32(2.0))
    zz = z * z
    series = Float32(1 / 13)
    for odd in (11, 9, 7, 5, 3, 1):
        series = series * zz + Float32(1 / odd)
    return ptx.maximum(x, Float32(0.0)) + (z + z) * series


class Cursor:
    """Where a row's live records are: P of them in bank c."""

    def __init__(self, length: Int32, bank: Int32) -> None:
        self.length = length
        self.bank = bank


class Weights:
    """e^(G_P), and w_j = e^(G_P - G_j) of the lane's four records."""

    def __init__(self, decays: list[Float32], lane: Lane, cursor: Cursor) -> None:
        self.total, *G = decays
        self.decay = ptx.exp(self.total)
        self.weight = [
            ptx.select(lane.quad * 2 + row < cursor.length, ptx.exp(self.total - g), Float32(0.0))
            for row, g in zip(RECORD, G, strict=True)
        ]


def request_decays(head_G: Int64, lane: Lane, cursor: Cursor, live: Boolean) -> list[Float32]:
    """Cumulative log decays of a head's history: G_P, and G_j of the lane's four records."""
    bank_G = head_G + Int64(cursor.bank * (WINDOW * 4))
    rows = [cursor.length - 1, *(lane.quad * 2 + r for r in RECORD)]
    return [
        ptx.bits_to_float(
            ptx.load_constant(
                bank_G + Int64(row * 4), 1, live & (row >= 0) & (row < cursor.length)
            )[0]
        )
        for row in rows
    ]


def request_deltas(
    head_u: Int64, lane: Lane, cursor: Cursor, first_row: Int32, live: Boolean
) -> list[Int32]:
    """The lane's words of its four records of U_hist, at a warp's value rows."""
    base = head_u + Int64(cursor.bank * BANK_BYTES + (first_row + lane.operand_row) * 2)
    words = []
    for r in RECORD:
        row = lane.quad * 2 + r
        at = base + Int64(row * (HEAD * 2))
        words += ptx.load_constant(at, lane.tiles, live & (row < cursor.length))
    return words


def delta_columns(lane: Lane, words: list[Int32]) -> list[list[Int32]]:
    """U_hist as column operands: per tile the lane's words (records 0, 1) and (records 8, 9)."""
    row = [words[i * lane.tiles : (i + 1) * lane.tiles] for i in range(4)]
    return [lane.columns(row[0], row[1]), lane.columns(row[2], row[3])]


def load_records(
    records: Shared16, slot_k: Int64, cursor: Cursor, thread: Int32, warps: int
) -> None:
    """Starts copying K_hist to shared memory, all threads of the CTA together. Dead rows become
    zeros, unread.
    """
    source = slot_k + Int64(cursor.bank * BANK_BYTES)
    for first in range(0, 16 * 16, warps * LANES):
        index = thread + first
        row, chunk = index >> 4, index & 15
        ptx.copy_async_or_zero(
            records.chunk(row, chunk), source + Int64(index * 16), row < cursor.length
        )


class RecordShare:
    """This thread's share of K_hist by way of registers: what ``load_records`` copies, where the
    copy must not be one of the groups that tiles are counted in.
    """

    def __init__(self, thread: Int32, warps: int) -> None:
        self.chunks = [thread + first for first in range(0, 16 * 16, warps * LANES)]

    def load(self, slot_k: Int64, cursor: Cursor, live: Boolean) -> list[list[Int32]]:
        source = slot_k + Int64(cursor.bank * BANK_BYTES)
        return [
            ptx.load_constant(source + Int64(chunk * 16), 4, live & ((chunk >> 4) < cursor.length))
            for chunk in self.chunks
        ]

    def store(self, records: Shared16, words: list[list[Int32]]) -> None:
        for chunk, row in zip(self.chunks, words, strict=True):
            ptx.store_shared(records.chunk(chunk >> 4, chunk & 15), row)


class Tile:
    """A warp's rows of one head's state in shared memory, 16-byte chunks swizzled against bank
    conflicts.

    A quarter of a warp reads two rows, of different parity. bf16: its 8 chunks are half a row of
    each, so odd rows have their halves of every 128 bytes exchanged. fp32: they are every other
    chunk, so odd rows have neighbours exchanged.
    """

    def __init__(self, wide: bool, rows: int) -> None:
        self.wide = wide
        self.rows = rows
        self.row_bytes = HEAD * (4 if wide else 2)
        self.bytes = rows * self.row_bytes

    def request(self, shared: Int32, source: Int64, lane: Int32) -> None:
        """Starts the copy of the tile, which is contiguous in global memory. ``source`` is the
        tile's first byte.
        """
        here = source + Int64(lane * 16)
        if self.wide:
            even = shared + lane * 16
            odd = shared + (lane ^ 1) * 16
            for row in range(self.rows):
                to = odd if row % 2 else even
                ptx.copy_async(to, row * self.row_bytes, here, row * self.row_bytes)
        else:
            parity = lane >> 4
            to = shared + parity * self.row_bytes + ((lane & 15) ^ (parity << 2)) * 16
            for pair in range(self.rows // 2):
                ptx.copy_async(to, pair * 512, here, pair * 512)

    def prefetch(self, source: Int64, leads: Boolean) -> None:
        """Brings the tile to L2, by one lane."""
        ptx.prefetch_l2(source, self.bytes, leads)

    def lane_bases(self, shared: Int32, lane: Lane) -> tuple[Int32, Int32]:
        """Addresses of the lane's first two chunks of tile 0; later ones lie at constant offsets
        from them.
        """
        row = shared + (lane.operand_row + lane.odd) * self.row_bytes
        if self.wide:
            first = row + lane.quad * 32
            return first + lane.odd * 16, first + (1 - lane.odd) * 16
        first = row + lane.quad * 16
        return first + lane.odd * 64, first + (1 - lane.odd) * 64

    def read(self, bases: tuple[Int32, Int32], tile: int, block: int) -> list[Int32]:
        """The lane's 8 elements of block ``block`` in its row of tile ``tile``: 4 words of bf16, or
        8 of fp32.
        """
        row = tile * 2 * self.row_bytes
        if self.wide:
            first = ptx.load_shared(bases[0], row + block * 128)
            return first + ptx.load_shared(bases[1], row + block * 128)
        return ptx.load_shared(bases[block % 2], row + (block // 2) * 128)

    def reader(
        self, bases: tuple[Int32, Int32], half: Int32 | None = None
    ) -> Callable[[int, int], list[Int32]]:
        """``read`` of the whole row, or of blocks counted from its half ``half``."""
        if half is not None:
            start = half * (self.row_bytes // 2)
            bases = bases[0] + start, bases[1] + start
        return lambda tile, block: self.read(bases, tile, block)


def product_terms(words: list[Int32]) -> list[list[Int32]]:
    """Eight state elements as operands: one list of 4 words for bf16, a high and a low one for
    fp32.
    """
    if len(words) == 4:
        return [words]
    values = [ptx.bits_to_float(w) for w in words]
    terms = [ptx.split(values[2 * i], values[2 * i + 1]) for i in range(4)]
    return [[t[0] for t in terms], [t[1] for t in terms]]


def weigh(
    lane: Lane, weights: Weights, deltas: list[list[Int32]]
) -> list[list[tuple[Int32, Int32]]]:
    """w o U_hist as row operands of the fold, by tile, records (0, 1) and (8, 9), and term."""
    w = weights.weight
    return [
        [
            ptx.split(
                ptx.low(deltas[half][tile]) * w[2 * half],
                ptx.high(deltas[half][tile]) * w[2 * half + 1],
            )
            for half in range(2)
        ]
        for tile in range(lane.tiles)
    ]


def fold(
    lane: Lane,
    half: Int32,
    decay: Float32,
    weighted: list[list[tuple[Int32, Int32]]],
    keys: Shared16,
    read: Callable[[int, int], list[Int32]],
    target: Int64,
    wide: bool,
) -> None:
    """Stores e^(G_P) S0 + (w o U_hist)^T K_hist of a warp's rows, columns 64 half to 64 half + 63.

    ``keys`` holds K_hist; ``read(tile, block)`` gives the lane's 8 elements of S0 and ``target`` is
    where those of tile 0, block 0 go, both counted from this half. Two tiles make the 16 rows of a
    product; columns are permuted as value rows are, so that a lane's results belong to the elements
    that it read.
    """
    size = 4 if wide else 2
    nothing = (Int32(0), Int32(0))
    for block in range(BLOCKS // 2):
        columns = keys.columns(lane, half, block)
        for tile in range(0, lane.tiles, 2):
            pair = [tile, tile + 1] if tile + 1 < lane.tiles else [tile]
            upper = weighted[tile]
            lower = weighted[tile + 1] if len(pair) == 2 else [nothing, nothing]
            sums = []
            for i in range(4):
                acc = [Float32(0.0)] * 4
                for term in range(2):
                    a = [upper[0][term], lower[0][term], upper[1][term], lower[1][term]]
                    acc = ptx.mma(acc, a, (columns[0][i], columns[1][i]))
                sums.append(acc)
            for side, member in enumerate(pair):
                written = [x for acc in sums for x in acc[2 * side : 2 * side + 2]]
                old = read(member, block)
                if wide:
                    old = [ptx.bits_to_float(word) for word in old]
                else:
                    old = [x for word in old for x in (ptx.low(word), ptx.high(word))]
                new = [decay * x + y for x, y in zip(old, written, strict=True)]
                words = [ptx.float_to_bits(x) for x in new] if wide else pack_all(new)
                to = target + Int64((member * 2 * HEAD + block * 32) * size)
                for i in range(0, len(words), 4):
                    ptx.store(to + Int64(i * 4), words[i : i + 4])


def request_token(
    token_a: Int64, token_b: Int64, A_log: Int64, dt_bias: Int64, live: Boolean, exists: Boolean
) -> list[Float32]:
    """What the gates of a head's token are made of: a, b, A_log, dt_bias."""
    return [
        ptx.load_half(token_a, live),
        ptx.load_half(token_b, live),
        ptx.bits_to_float(ptx.load_constant(A_log, 1, exists)[0]),
        ptx.bits_to_float(ptx.load_constant(dt_bias, 1, exists)[0]),
    ]


class Gates:
    """beta of the lane's token, and c, the log decay from before token 0 to after that token."""

    def __init__(self, raw: list[Float32], lane: Lane, live: Boolean) -> None:
        zero = Float32(0.0)
        a, b, A_log, dt_bias = raw
        g = zero - ptx.exp(A_log) * softplus(a + dt_bias)
        c = ptx.select(live, g, zero)
        for distance in (1, 2, 4):
            before = ptx.shuffle_up(c, 4 * distance)
            c = c + ptx.select(lane.token >= distance, before, zero)
        self.c = c
        sigmoid = ptx.reciprocal(Float32(1.0) + ptx.exp(zero - b))
        self.beta = ptx.select(live, sigmoid, zero)


def state_products(
    lane: Lane, X: Operand, read: Callable[[int, int], list[Int32]]
) -> list[list[Float32]]:
    """R = X S0^T for each tile of 8 value rows."""
    R = [[Float32(0.0)] * 4 for _ in range(lane.tiles)]
    for block in range(BLOCKS):
        rows = [X.fragment(lane, block, step) for step in range(2)]
        for tile in range(lane.tiles):
            for term in product_terms(read(tile, block)):
                for step, row in enumerate(rows):
                    R[tile] = ptx.mma(R[tile], row, (term[2 * step], term[2 * step + 1]))
    return R


def shared_products(
    lane: Lane, X: Operand, records: Shared16
) -> tuple[list[list[Float32]], list[Float32]]:
    """C = X K_hist^T for records 0-7 and 8-15, and M = X k^^T, whose column operand is the k^ part
    of its row operand.
    """
    C = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
    M = [Float32(0.0)] * 4
    bases = records.row_bases(lane)
    for block in range(BLOCKS):
        past = records.rows(bases, block)
        for step in range(2):
            row = X.fragment(lane, block, step)
            M = ptx.mma(M, row, (row[0], row[2]))
            for half in range(2):
                C[half] = ptx.mma(C[half], row, (past[half][2 * step], past[half][2 * step + 1]))
    return C, M


class Coefficients:
    """What a head's rows are combined with, the same for all value rows and without its state:

    ``past``: w o C as two bf16 terms each of a row operand, which the accumulators of C are, lane
    by lane. ``A``, ``B``: what this lane's token takes of the deltas of tokens 2 quad and 2 quad +
    1, for u and for y. ``since``: e^c.
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
            ptx.split(C[half][2 * x] * w[2 * half], C[half][2 * x + 1] * w[2 * half + 1])
            for half in range(2)
            for x in range(2)
        ]
        zero = Float32(0.0)
        self.A, self.B = [], []
        for i in range(2):
            s = lane.quad * 2 + i
            decay = ptx.exp(gates.c - ptx.shuffle(gates.c, s * 4))
            self.A.append(ptx.select(s < lane.token, gates.beta * decay * M[i], zero))
            self.B.append(ptx.select(s <= lane.token, decay * M[2 + i], zero))
        self.since = ptx.exp(gates.c)
        self.beta = gates.beta
        self.decay = weights.decay


def add_history(
    R: list[list[Float32]], coefficients: Coefficients, deltas: list[list[Int32]]
) -> list[list[Float32]]:
    """H = e^(G_P) R + (w o C) U_hist."""
    H = []
    for tile, products in enumerate(R):
        acc = [coefficients.decay * x for x in products]
        for term in range(2):
            row = [t[term] for t in coefficients.past]
            acc = ptx.mma(acc, row, (deltas[0][tile], deltas[1][tile]))
        H.append(acc)
    return H


def substitute(
    lane: Lane,
    tokens: int,
    coefficients: Coefficients,
    values: list[Int32],
    H: list[list[Float32]],
) -> tuple[list[Float32], list[Float32]]:
    """u and y of the lane's token, at the lane's value rows, by forward substitution over the
    tokens.
    """
    u, y = [], []
    since, beta = coefficients.since, coefficients.beta
    for tile, acc in enumerate(H):
        v = ptx.low(values[tile]), ptx.high(values[tile])
        for i in range(2):
            u.append(beta * (v[i] - since * acc[i]))
            y.append(since * acc[2 + i])

    row = lane.index & -4
    for s in range(tokens):
        a = ptx.shuffle(coefficients.A[s % 2], row + s // 2)
        b = ptx.shuffle(coefficients.B[s % 2], row + s // 2)
        reached = lane.token >= s
        for x in range(len(u)):
            known = ptx.select(reached, ptx.shuffle(u[x], lane.quad + 4 * s), Float32(0.0))
            y[x] = y[x] + b * known
            if s < tokens - 1:
                u[x] = u[x] - a * known
    return u, y


def pack_all(values: list[Float32]) -> list[Int32]:
    return [ptx.pack(values[i], values[i + 1]) for i in range(0, len(values), 2)]


class Verify:
    """The verify op. One instance is one plan's specialization.

    The grid is at most ``ctas`` CTAs. A warp has two buffers for its tiles of the state, used in
    turn. ``kernel`` walks units of one head, or a part of its value rows, in strides of the grid;
    the next unit's tile is requested before this one is worked on. For few heads, where all that
    counts is how soon the first result is there.

    ``grouped_kernel`` is for many heads. A CTA takes consecutive ones, its even share of all rows'
    heads, as one stream: the next head's tile is requested once this head's is there, no sooner,
    and what else a head is made of is loaded into registers while the head before it is worked on.
    All that does not need the tile is done before it is waited for. A *unit* is what the stream has
    of one key head; the next unit's keys, queries and K_hist are requested at a unit's start, and
    have shared memory of their own. So a unit begins with one barrier and no wait for memory.

    One tile a warp is under way, not two, with which the first tiles of all warps, and all other
    loads, probably come later. On an H200 (16/32 heads, bf16, T = 4) 16, 32, 64 and 256 requests
    took 11.5, 17.9, 31.2 and 110 us with two, 9.1, 15.8, 29.6 and 108 with one, and more with tiles
    ahead brought to L2.

    Both bring their first tile to L2 before they wait for earlier grids. That reads row slots which
    those may still write, for nothing but the prefetch.
    """

    def __init__(
        self,
        state: str,
        tokens: int,
        rows: int,
        warps: int,
        grouped: bool,
        resident: int,
    ) -> None:
        self.wide = STATE[state] is Float32
        self.tokens = tokens
        self.rows = rows
        self.warps = warps
        self.grouped = grouped
        self.resident = resident
        self.tile = Tile(self.wide, rows)
        self.parts = HEAD // (rows * warps)
        self.pair = Shared16.BYTES + Operand.BYTES
        self.raw = 2 * 16 * max(8 * HEAD * 2 // 16, warps * LANES)  # keys and queries of 8 tokens
        self.operands = 2 * self.pair + self.raw if grouped else self.pair
        self.shared_memory = 2 * warps * self.tile.bytes + self.operands

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        state: cute.Tensor,
        rec_u: cute.Tensor,
        rec_k: cute.Tensor,
        rec_G: cute.Tensor,
        hist_len: cute.Tensor,
        bank: cute.Tensor,
        slot: cute.Tensor,
        out: cute.Tensor,
        scale: Float32,
        ctas: Int32,
        stream: Any,
    ) -> None:
        parts = v.shape[0] * v.shape[2] * self.parts
        kernel = self.grouped_kernel if cutlass.const_expr(self.grouped) else self.kernel
        if cutlass.const_expr(self.grouped):
            ctas = ctas // self.parts * self.parts
        kernel(
            q, k, v, a, b, A_log, dt_bias,
            state, rec_u, rec_k, rec_G, hist_len, bank, slot, out, scale,
        ).launch(
            grid=(cutlass.min(parts, ctas), 1, 1),
            block=(LANES * self.warps, 1, 1),
            smem=self.shared_memory,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        state: cute.Tensor,
        rec_u: cute.Tensor,
        rec_k: cute.Tensor,
        rec_G: cute.Tensor,
        hist_len: cute.Tensor,
        bank: cute.Tensor,
        slot: cute.Tensor,
        out: cute.Tensor,
        scale: Float32,
    ) -> None:
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        warp = thread // LANES
        value_heads = Int32(v.shape[2])
        ratio = value_heads // Int32(k.shape[2])
        per_ratio = (Int32(1 << 16) + ratio - 1) // ratio
        row_units = value_heads * self.parts
        rows = Int32(v.shape[0])
        step_row, step_unit = ctas // row_units, ctas % row_units
        tokens = Int32(q.shape[1])
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()
        records = Shared16(shared)
        X = Operand(shared + Shared16.BYTES)
        buffer = shared + self.operands + warp * (2 * self.tile.bytes)
        # a unit is (row n, head and part within the row); *_1 belong to the unit after this one,
        # *_2 to the one after that
        n, within = cta // row_units, cta % row_units
        early = early_slot(slot, n, state)
        if early >= 0:
            self.tile.prefetch(self.tile_address(state, early, within, warp), thread % LANES == 0)
        ptx.wait_for_previous_grid()
        ptx.let_next_grid_launch()

        n_1, within_1 = advance_unit(n, within, step_row, step_unit, row_units)
        s = ptx.load(element_address(slot, n), 1)[0]
        s_1 = row_slot(slot, n_1, rows)
        length, current = cursor_of(hist_len, bank, s)
        if s >= 0:
            tile_at = self.tile_address(state, s, within, warp)
            self.tile.request(buffer, tile_at, thread % LANES)
        ptx.copy_async_commit()
        parity = Int32(0)

        while n < rows:
            me = ptx.opaque(thread)
            lane = Lane(me % LANES, self.rows // 8)
            head = within // self.parts
            part = within % self.parts
            first_row = (part * self.warps + warp) * self.rows
            key_head = (head * per_ratio) >> 16
            column = first_row + lane.result_row
            live = lane.token < tokens
            cursor = Cursor(length, current)
            slot_k = element_address(rec_k, s, key_head)

            share = Share(me, self.warps)
            raw_k = share.load(element_address(k, n, share.token, key_head), share.token < tokens)
            raw_q = share.load(element_address(q, n, share.token, key_head), share.token < tokens)
            if s >= 0:
                load_records(records, slot_k, cursor, me, self.warps)
            ptx.copy_async_commit()
            if s_1 >= 0:
                tile_at = self.tile_address(state, s_1, within_1, warp)
                self.tile.request(buffer + (1 - parity) * self.tile.bytes, tile_at, lane.index)
            ptx.copy_async_commit()
            length, current = cursor_of(hist_len, bank, s_1)
            n_2, within_2 = advance_unit(n_1, within_1, step_row, step_unit, row_units)
            s_2 = row_slot(slot, n_2, rows)

            if s < 0:
                zeros = [Int32(0)] * lane.tiles
                ptx.store(element_address(out, n, lane.token, head, column), zeros, live)
            else:
                every = Boolean(True)
                values = ptx.load_constant(
                    element_address(v, n, lane.token, head, column), lane.tiles, live
                )
                raw = request_token(
                    element_address(a, n, lane.token, head),
                    element_address(b, n, lane.token, head),
                    element_address(A_log, head),
                    element_address(dt_bias, head),
                    live,
                    every,
                )
                head_G = element_address(rec_G, s, head)
                head_u = element_address(rec_u, s, head)
                decays = request_decays(head_G, lane, cursor, every)
                deltas = request_deltas(head_u, lane, cursor, first_row, every)

                commits, to_record = self.new_records(cursor, tokens)
                store_operand(
                    X,
                    share,
                    normalize(share, raw_k, Float32(1.0)),
                    normalize(share, raw_q, scale),
                    slot_k + Int64((to_record + share.token) * (HEAD * 2)),
                    (part == 0) & (head == key_head * ratio) & (share.token < tokens),
                )
                to_record = to_record + lane.token
                gates = Gates(raw, lane, live)
                weights = Weights(decays, lane, cursor)
                base = ptx.select(commits, Float32(0.0), weights.total)
                ptx.store(
                    head_G + Int64(to_record * 4),
                    [ptx.float_to_bits(base + gates.c)],
                    live & (first_row == 0) & (lane.quad == 0),
                )
                U = delta_columns(lane, deltas)
                ptx.copy_async_wait(1)
                ptx.sync_cta()

                C, M = shared_products(lane, X, records)
                coefficients = Coefficients(lane, gates, weights, C, M)
                bases = self.tile.lane_bases(buffer + parity * self.tile.bytes, lane)
                R = state_products(lane, X, self.tile.reader(bases))
                H = add_history(R, coefficients, U)
                u, y = substitute(lane, self.tokens, coefficients, values, H)
                head_out = element_address(out, n, lane.token, head, column)
                ptx.store(head_out, pack_all(y), live)
                ptx.store(head_u + Int64(to_record * (HEAD * 2) + column * 2), pack_all(u), live)
                if commits:
                    row = first_row + lane.operand_row + lane.odd
                    target = element_address(state, s, head, row, lane.quad * 8)
                    weighted = weigh(lane, weights, U)
                    # a loop, because the compiler turns straight code under a branch into
                    # predicated code that always runs
                    for half in cutlass.range(2, unroll=1):
                        fold(
                            lane, half, weights.decay, weighted, records,
                            self.tile.reader(bases, half),
                            target + Int64(half * (self.tile.row_bytes // 2)), self.wide,
                        )  # fmt: skip
                ptx.sync_cta()

            n, within, s = n_1, within_1, s_1
            n_1, within_1, s_1 = n_2, within_2, s_2
            parity = 1 - parity

    @cute.kernel
    def grouped_kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        state: cute.Tensor,
        rec_u: cute.Tensor,
        rec_k: cute.Tensor,
        rec_G: cute.Tensor,
        hist_len: cute.Tensor,
        bank: cute.Tensor,
        slot: cute.Tensor,
        out: cute.Tensor,
        scale: Float32,
    ) -> None:
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        value_heads = Int32(v.shape[2])
        ratio = value_heads // Int32(k.shape[2])
        per_ratio = (Int32(1 << 16) + ratio - 1) // ratio
        rows = Int32(v.shape[0])
        tokens = Int32(q.shape[1])
        part = cta % self.parts
        first_row = (part * self.warps + thread // LANES) * self.rows
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()
        buffer = shared + self.operands + thread // LANES * (2 * self.tile.bytes)
        # This CTA's share: ``left`` heads from ``head`` of row n on. *_1 and *_2 belong to the rows
        # after row n.
        shares, index, heads = ctas // self.parts, cta // self.parts, rows * value_heads
        left = heads // shares
        start = left * index + cutlass.min(index, heads % shares)
        left = left + Int32(index < heads % shares)
        n, head = start // value_heads, start % value_heads
        early = early_slot(slot, n, state)
        if early >= 0:
            tile_at = element_address(state, early, head, first_row)
            self.tile.prefetch(tile_at, thread % LANES == 0)
        ptx.wait_for_previous_grid()
        ptx.let_next_grid_launch()

        self.request_keys(shared, thread, q, k, n, (head * per_ratio) >> 16)
        ptx.copy_async_commit()
        s = ptx.load(element_address(slot, n), 1)[0]
        s_1, s_2 = row_slot(slot, n + 1, rows), row_slot(slot, n + 2, rows)
        length, current = cursor_of(hist_len, bank, s)
        if s >= 0:
            tile_at = element_address(state, s, head, first_row)
            self.tile.request(buffer, tile_at, thread % LANES)
        ptx.copy_async_commit()
        length_1, current_1 = cursor_of(hist_len, bank, s_1)
        raw_K = RecordShare(thread, self.warps).load(
            element_address(rec_k, s, (head * per_ratio) >> 16), Cursor(length, current), s >= 0
        )
        next_v, next_token, next_G, next_u = self.request_head(
            Lane(thread % LANES, self.rows // 8), Cursor(length, current),
            v, a, b, A_log, dt_bias, rec_u, rec_G, n, s, head, first_row, s >= 0,
        )  # fmt: skip
        RecordShare(thread, self.warps).store(Shared16(shared), raw_K)
        ptx.copy_async_wait(1)
        parity, at = Int32(0), Int32(0)

        while left > 0:
            me = ptx.opaque(thread)
            lane = Lane(me % LANES, self.rows // 8)
            live = lane.token < tokens
            column = first_row + lane.result_row
            share = Share(me, self.warps)
            raw = self.raw_of(shared, me)
            operands = shared + parity * self.pair
            records = Shared16(operands)
            X = Operand(operands + Shared16.BYTES)
            key_head = (head * per_ratio) >> 16
            unit = cutlass.min((key_head + 1) * ratio - head, left)
            cursor = Cursor(length, current)
            commits, to_record = self.new_records(cursor, tokens)
            store_operand(
                X,
                share,
                normalize(share, share.take(raw), Float32(1.0)),
                normalize(share, share.take(raw + self.raw // 2), scale),
                element_address(rec_k, s, key_head) + Int64((to_record + share.token) * (HEAD * 2)),
                (s >= 0) & (part == 0) & (head == key_head * ratio) & (share.token < tokens),
            )
            to_record = to_record + lane.token
            # the unit after this one: further on in this row, or the first of the next
            wraps = head + unit >= value_heads
            head_1 = ptx.select(wraps, Int32(0), head + unit)
            s_a = ptx.select(unit < left, ptx.select(wraps, s_1, s), Int32(-1))
            cursor_a = Cursor(
                ptx.select(wraps, length_1, length), ptx.select(wraps, current_1, current)
            )
            # All warps have passed the barrier before, so none reads this pair of operands any
            # more; behind this one, none reads the other pair.
            ptx.sync_cta()
            if s_a >= 0:
                to = shared + (1 - parity) * self.pair
                key_head_1 = (head_1 * per_ratio) >> 16
                slot_k = element_address(rec_k, s_a, key_head_1)
                load_records(Shared16(to), slot_k, cursor_a, me, self.warps)
                self.request_keys(shared, me, q, k, n + Int32(wraps), key_head_1)
            ptx.copy_async_commit()

            C, M = shared_products(lane, X, records)
            for i in cutlass.range(unit, unroll=1):
                bases = self.tile.lane_bases(buffer + at * self.tile.bytes, lane)
                values, token, decays, deltas = next_v, next_token, next_G, next_u

                last = i + 1 == unit
                # hidden from the optimizer, which would keep every address of the row in registers
                # over this loop
                row_n, row_s = ptx.opaque(n), ptx.opaque(s)
                n_b = ptx.select(last & wraps, row_n + 1, row_n)
                s_b = ptx.select(last, s_a, row_s)
                head_b = ptx.select(last, head_1, head + i + 1)
                cursor_b = Cursor(
                    ptx.select(last, cursor_a.length, length),
                    ptx.select(last, cursor_a.bank, current),
                )
                next_v, next_token, next_G, next_u = self.request_head(
                    lane, cursor_b,
                    v, a, b, A_log, dt_bias, rec_u, rec_G, n_b, s_b, head_b, first_row, s_b >= 0,
                )  # fmt: skip

                # all that does not need the tile
                gates = Gates(token, lane, live)
                weights = Weights(decays, lane, cursor)
                coefficients = Coefficients(lane, gates, weights, C, M)
                U = delta_columns(lane, deltas)
                base = ptx.select(commits, Float32(0.0), weights.total)
                ptx.store(
                    element_address(rec_G, row_s, head + i) + Int64(to_record * 4),
                    [ptx.float_to_bits(base + gates.c)],
                    live & (s >= 0) & (first_row == 0) & (lane.quad == 0),
                )
                # younger than the tile of a unit's first head: the next unit's operands
                if i == 0:
                    ptx.copy_async_wait(1)
                else:
                    ptx.copy_async_wait(0)
                # From here on no lane reads the other buffer any more.
                ptx.sync_warp()
                s_t, tile_at = self.tile_ahead(
                    state, s, s_1, head + i + 1, first_row, value_heads, i + 1 < left
                )
                if s_t >= 0:
                    to = buffer + (1 - at) * self.tile.bytes
                    self.tile.request(to, tile_at, lane.index)
                ptx.copy_async_commit()
                head_out = element_address(out, row_n, lane.token, head + i, column)
                if s < 0:
                    ptx.store(head_out, [Int32(0)] * lane.tiles, live)
                else:
                    R = state_products(lane, X, self.tile.reader(bases))
                    H = add_history(R, coefficients, U)
                    u, y = substitute(lane, self.tokens, coefficients, values, H)
                    ptx.store(head_out, pack_all(y), live)
                    to_u = element_address(rec_u, row_s, head + i)
                    to_u = to_u + Int64(to_record * (HEAD * 2) + column * 2)
                    ptx.store(to_u, pack_all(u), live)
                    if commits:
                        row = first_row + lane.operand_row + lane.odd
                        target = element_address(state, row_s, head + i, row, lane.quad * 8)
                        weighted = weigh(lane, weights, U)
                        # a loop, because the compiler turns straight code under a branch into
                        # predicated code that always runs
                        for half in cutlass.range(2, unroll=1):
                            fold(
                                lane, half, weights.decay, weighted, records,
                                self.tile.reader(bases, half),
                                target + Int64(half * (self.tile.row_bytes // 2)), self.wide,
                            )  # fmt: skip

                at = 1 - at

            # the next unit's operands; younger than they is the next unit's first tile
            ptx.copy_async_wait(1)
            parity = 1 - parity
            left = left - unit
            head = head_1
            if wraps:
                n = n + 1
                s, length, current = s_1, length_1, current_1
                s_1 = s_2
                length_1, current_1 = cursor_of(hist_len, bank, s_1)
                s_2 = row_slot(slot, n + 2, rows)

    @staticmethod
    def tile_ahead(
        state: cute.Tensor,
        s: Int32,
        s_1: Int32,
        head: Int32,
        first_row: Int32,
        value_heads: Int32,
        exists: Boolean,
    ) -> tuple[Int32, Int64]:
        """The slot, or -1, and the address of a warp's rows of a head, which is counted from row
        n's first one on into the next row.
        """
        wraps = head >= value_heads
        s = ptx.select(wraps, s_1, s)
        head = ptx.select(wraps, head - value_heads, head)
        return ptx.select(exists, s, Int32(-1)), element_address(state, s, head, first_row)

    @staticmethod
    def new_records(cursor: Cursor, tokens: Int32) -> tuple[Boolean, Int32]:
        """Whether a row commits, and where its first new record goes, counted over both banks."""
        commits = cursor.length + tokens > WINDOW
        to_row = ptx.select(commits, Int32(0), cursor.length)
        to_bank = ptx.select(commits, 1 - cursor.bank, cursor.bank)
        return commits, to_bank * WINDOW + to_row

    def raw_of(self, shared: Int32, thread: Int32) -> Int32:
        """Where this thread has its share of a unit's keys; half of ``raw`` on, of its queries."""
        return shared + 2 * self.pair + thread * 16

    def request_keys(
        self,
        shared: Int32,
        thread: Int32,
        q: cute.Tensor,
        k: cute.Tensor,
        n: Int32,
        key_head: Int32,
    ) -> None:
        """Requests this thread's shares of a unit's keys and queries."""
        share = Share(thread, self.warps)
        live = share.token < Int32(q.shape[1])
        raw = self.raw_of(shared, thread)
        share.request(raw, element_address(k, n, share.token, key_head), live)
        share.request(raw + self.raw // 2, element_address(q, n, share.token, key_head), live)

    @staticmethod
    def request_head(
        lane: Lane,
        cursor: Cursor,
        v: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        rec_u: cute.Tensor,
        rec_G: cute.Tensor,
        n: Int32,
        s: Int32,
        head: Int32,
        first_row: Int32,
        exists: Boolean,
    ) -> tuple[list[Int32], list[Float32], list[Float32], list[Int32]]:
        """All that a warp's rows of a head are made of besides the state and what the heads of a
        key head share: values, gates, and the history's decays and deltas.
        """
        live = exists & (lane.token < Int32(v.shape[1]))
        column = first_row + lane.result_row
        return (
            ptx.load_constant(element_address(v, n, lane.token, head, column), lane.tiles, live),
            request_token(
                element_address(a, n, lane.token, head),
                element_address(b, n, lane.token, head),
                element_address(A_log, head),
                element_address(dt_bias, head),
                live,
                exists,
            ),
            request_decays(element_address(rec_G, s, head), lane, cursor, exists),
            request_deltas(element_address(rec_u, s, head), lane, cursor, first_row, exists),
        )

    def tile_address(self, state: cute.Tensor, s: Int32, within: Int32, warp: Int32) -> Int64:
        row = (within % self.parts * self.warps + warp) * self.rows
        return element_address(state, s, within // self.parts, row)


def advance_unit(
    n: Int32, within: Int32, step_row: Int32, step_unit: Int32, row_units: Int32
) -> tuple[Int32, Int32]:
    """The unit one grid stride on, without a division."""
    within = within + step_unit
    wraps = within >= row_units
    return n + step_row + Int32(wraps), ptx.select(wraps, within - row_units, within)


def cursor_of(hist_len: cute.Tensor, bank: cute.Tensor, s: Int32) -> tuple[Int32, Int32]:
    """hist_len and bank of a slot; zeros where there is none."""
    length = ptx.load(element_address(hist_len, s), 1, s >= 0)[0]
    return length, ptx.load(element_address(bank, s), 1, s >= 0)[0]


def early_slot(slot: cute.Tensor, n: Int32, state: cute.Tensor) -> Int32:
    """The slot of row n as it is while earlier grids may still run, for a prefetch: whatever has
    been there is a slot or becomes -1. Past L1, which would keep it for the load that counts.
    """
    exists = n < Int32(slot.shape[0])
    s = ptx.load(element_address(slot, n), 1, exists, ".cg")[0]
    return ptx.select(exists & (s >= 0) & (s < Int32(state.shape[0])), s, Int32(-1))


def row_slot(slot: cute.Tensor, n: Int32, rows: Int32) -> Int32:
    """The slot of row n; -1 past the end."""
    s = ptx.load(element_address(slot, n), 1, n < rows)[0]
    return ptx.select(n < rows, s, Int32(-1))


class Materialize:
    """The fold alone, from one slot's checkpoint and records into another slot's checkpoint."""

    ROWS, WARPS = 16, 4

    def __init__(self, state: str) -> None:
        self.wide = STATE[state] is Float32

    @cute.jit
    def __call__(
        self,
        state: cute.Tensor,
        rec_u: cute.Tensor,
        rec_k: cute.Tensor,
        rec_G: cute.Tensor,
        bank: cute.Tensor,
        src: cute.Tensor,
        dst: cute.Tensor,
        count: cute.Tensor,
        stream: Any,
    ) -> None:
        self.kernel(state, rec_u, rec_k, rec_G, bank, src, dst, count).launch(
            grid=(HEAD // (self.ROWS * self.WARPS), rec_u.shape[1], src.shape[0]),
            block=(LANES * self.WARPS, 1, 1),
            smem=Shared16.BYTES,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        state: cute.Tensor,
        rec_u: cute.Tensor,
        rec_k: cute.Tensor,
        rec_G: cute.Tensor,
        bank: cute.Tensor,
        src: cute.Tensor,
        dst: cute.Tensor,
        count: cute.Tensor,
    ) -> None:
        part, head, n = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = Lane(thread % LANES, self.ROWS // 8)
        first_row = (part * self.WARPS + thread // LANES) * self.ROWS
        key_head = head // (Int32(rec_u.shape[1]) // Int32(rec_k.shape[1]))
        source = ptx.load(element_address(src, n), 1)[0]
        target = ptx.load(element_address(dst, n), 1)[0]
        if (source >= 0) & (target >= 0):
            length = ptx.load(element_address(count, n), 1)[0]
            cursor = Cursor(length, ptx.load(element_address(bank, source), 1)[0])
            records = Shared16(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
            slot_k = element_address(rec_k, source, key_head)
            load_records(records, slot_k, cursor, thread, self.WARPS)
            ptx.copy_async_commit()
            every = Boolean(True)
            head_G = element_address(rec_G, source, head)
            weights = Weights(request_decays(head_G, lane, cursor, every), lane, cursor)
            head_u = element_address(rec_u, source, head)
            deltas = delta_columns(lane, request_deltas(head_u, lane, cursor, first_row, every))
            row = first_row + lane.operand_row + lane.odd
            column = lane.quad * 8
            ptx.copy_async_wait(0)
            ptx.sync_cta()
            weighted = weigh(lane, weights, deltas)
            for half in cutlass.range(2, unroll=1):
                at = column + half * (HEAD // 2)
                fold(
                    lane, half, weights.decay, weighted, records,
                    global_reader(element_address(state, source, head, row, at), self.wide),
                    element_address(state, target, head, row, at), self.wide,
                )  # fmt: skip


def global_reader(lane_address: Int64, wide: bool) -> Callable[[int, int], list[Int32]]:
    size = 4 if wide else 2

    def read(tile: int, block: int) -> list[Int32]:
        start = lane_address + Int64((tile * 2 * HEAD + block * 32) * size)
        words: list[Int32] = []
        for i in range(size // 2):
            words += ptx.load(start + Int64(i * 16), 4)
        return words

    return read


CURSOR_THREADS = 128


@cute.kernel
def advance_kernel(
    hist_len: cute.Tensor,
    bank: cute.Tensor,
    slot: cute.Tensor,
    n_acc: cute.Tensor,
    tokens: Int32,
) -> None:
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    n = block * CURSOR_THREADS + thread
    s = row_slot(slot, n, Int32(slot.shape[0]))
    live = s >= 0
    accepted = ptx.load(element_address(n_acc, n), 1, live)[0]
    length = ptx.load(element_address(hist_len, s), 1, live)[0]
    current = ptx.load(element_address(bank, s), 1, live)[0]
    commits = length + tokens > WINDOW
    kept = ptx.select(commits, Int32(0), length)
    ptx.store(element_address(hist_len, s), [kept + accepted], live)
    ptx.store(element_address(bank, s), [ptx.select(commits, 1 - current, current)], live)


@cute.jit
def advance(
    hist_len: cute.Tensor,
    bank: cute.Tensor,
    slot: cute.Tensor,
    n_acc: cute.Tensor,
    tokens: Int32,
    stream: Any,
) -> None:
    """Once a step, after acceptance and after the last layer: the only writer of the cursors
    besides reset.
    """
    advance_kernel(hist_len, bank, slot, n_acc, tokens).launch(
        grid=((slot.shape[0] + CURSOR_THREADS - 1) // CURSOR_THREADS, 1, 1),
        block=(CURSOR_THREADS, 1, 1),
        stream=stream,
    )


@cute.kernel
def reset_kernel(hist_len: cute.Tensor, bank: cute.Tensor, slot: cute.Tensor) -> None:
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    s = row_slot(slot, block * CURSOR_THREADS + thread, Int32(slot.shape[0]))
    ptx.store(element_address(hist_len, s), [Int32(0)], s >= 0)
    ptx.store(element_address(bank, s), [Int32(0)], s >= 0)


@cute.jit
def reset(hist_len: cute.Tensor, bank: cute.Tensor, slot: cute.Tensor, stream: Any) -> None:
    """On allocation of a slot, after its prefill, on resume: no history, whatever records hold."""
    reset_kernel(hist_len, bank, slot).launch(
        grid=((slot.shape[0] + CURSOR_THREADS - 1) // CURSOR_THREADS, 1, 1),
        block=(CURSOR_THREADS, 1, 1),
        stream=stream,
    )


class Fakes:
    """Fake arguments that share symbolic extents, so that the compiled module checks them against
    each other.
    """

    def __init__(self) -> None:
        self.extents: dict[str, Any] = {}

    def extent(self, name: str | int) -> Any:
        if isinstance(name, int):
            return name
        return self.extents.setdefault(name, cute.sym_int(32, symbol=name))

    def tensor(
        self,
        dtype: Any,
        shape: tuple[str | int, ...],
        free: int,
        divisibility: int = 1,
        stride_bits: int = 32,
    ) -> Any:
        """The first ``free`` strides are symbolic multiples of ``divisibility`` elements, the
        others dense.
        """
        strides: list[Any] = []
        dense: Any = 1
        for at in reversed(range(len(shape))):
            if at < free:
                strides.append(cute.sym_int(stride_bits, divisibility=divisibility))
            else:
                strides.append(dense)
                dense = dense * shape[at] if at > free else dense
        return make_fake_tensor(
            dtype,
            tuple(self.extent(x) for x in shape),
            tuple(reversed(strides)),
            assumed_align=dtype.width // 8 * divisibility,
        )

    def pools(self, state: str) -> tuple[Any, ...]:
        wide = STATE[state]
        return (
            self.tensor(wide, ("slots", "HV", HEAD, HEAD), 1, 128 // wide.width, 64),
            self.tensor(BFloat16, ("slots", "HV", 2, WINDOW, HEAD), 1, 8, 64),
            self.tensor(BFloat16, ("slots", "HK", 2, WINDOW, HEAD), 1, 8, 64),
            self.tensor(Float32, ("slots", "HV", 2, WINDOW), 1, 1, 64),
        )

    def cursors(self) -> tuple[Any, Any]:
        return self.tensor(Int32, ("slots",), 0), self.tensor(Int32, ("slots",), 0)

    def row_integers(self, count: int) -> tuple[Any, ...]:
        return tuple(self.tensor(Int32, ("N",), 1) for _ in range(count))


def lower(plan: Plan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The host function of a plan and the fake arguments to compile it with."""
    fakes = Fakes()
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if plan.op == "advance":
        return advance, (*fakes.cursors(), *fakes.row_integers(2), Int32(1), stream)
    if plan.op == "reset":
        return reset, (*fakes.cursors(), *fakes.row_integers(1), stream)
    state = str(plan["state"])
    if plan.op == "materialize":
        bank = fakes.cursors()[1]
        rows = fakes.row_integers(3)
        return Materialize(state), (*fakes.pools(state), bank, *rows, stream)

    names = ("tokens", "rows", "warps", "grouped", "resident")
    sizes = [plan.int(name) for name in names]
    heads = fakes.tensor(Float32, ("HV",), 0)
    key_rows = [fakes.tensor(BFloat16, ("N", "T", "HK", HEAD), 2, 8) for _ in range(2)]
    value_rows = [fakes.tensor(BFloat16, ("N", "T", "HV", HEAD), 2, 8) for _ in range(2)]
    gate_rows = [fakes.tensor(BFloat16, ("N", "T", "HV"), 2) for _ in range(2)]
    return Verify(state, *sizes), (
        *key_rows, value_rows[0], *gate_rows, heads, fakes.tensor(Float32, ("HV",), 0),
        *fakes.pools(state), *fakes.cursors(), *fakes.row_integers(1), value_rows[1],
        Float32(1.0), Int32(1), stream,
    )  # fmt: skip
