"""Gated DeltaNet verify over a checkpoint plus records, committing in the kernel.

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

Nothing else is written: no live record, cursor, checkpoint of another row, or slot without a row.
A padding row, whose slot is -1, writes zeros to ``out``, whatever q, k, v, a and b hold there. Dead
records are not loaded, decays are exponentials of differences <= 0, masks are selects. A result
depends on the row's own inputs alone, bit for bit: not on slot numbers, row order, the batch, or
how a plan shares the work.

How work is distributed. A warp owns ``rows`` value rows of a head, and its products chain in
registers: value rows and columns are permuted so that a lane's operands and results are consecutive
in memory, the accumulators of C are the row operand of (w o C) U_hist, and the fold's results
belong to the state elements that the lane read. Only the substitution shuffles. A CTA is ``warps``
warps; they share X and K_hist in shared memory, where each warp also has two buffers for its tiles
of the state. ``128 // (rows * warps)`` CTAs, the plan's splits, share a head.

Modules: ``tiles`` (layouts over lanes and in shared memory), ``operands`` (X), ``cursors`` (slots,
cursors, ``advance`` and ``reset``), ``history`` (records and their fold), ``recurrence`` (the new
tokens), ``verify`` (kernel for few heads), ``stream`` (kernel for many heads), ``materialize``,
``lower``.

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
