"""Peers of ``gdn_replay`` in Triton, written for the benchmark: a state after every token, and the
replay design itself.

Both take the tensors of ``kernels/gdn_replay/reference.py``; q, k, v, a and b may be strided views,
pools have a strided slot dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

HEAD, WINDOW = 128, 16


@triton.jit
def _gates(a, b, A_log, dt_bias):  # noqa: ANN001, ANN202
    x = a.to(tl.float32) + dt_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    beta = 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
    return -tl.exp(A_log) * softplus, beta


@triton.jit
def _snapshots(  # noqa: ANN202
    q, k, v, a, b, A_log, dt_bias, state, slot, out, states,  # noqa: ANN001
    qkv_n, qkv_t, ba_n, ba_t, slot_stride, state_slot, scale, HK, HV,  # noqa: ANN001
    T: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Token after token; the state after each is stored, for the next step to start from."""
    n, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s = tl.load(slot + n * slot_stride).to(tl.int64)
    column = tl.arange(0, 128)
    row = part * BV + tl.arange(0, BV)
    tile = row[:, None] * 128 + column[None, :]
    key_head = head // (HV // HK)
    if s >= 0:
        S = tl.load(state + s * state_slot + head * 16384 + tile).to(tl.float32)
        A = tl.load(A_log + head)
        bias = tl.load(dt_bias + head)
        for t in tl.static_range(T):
            at = n * qkv_n + t * qkv_t
            key = tl.load(k + at + key_head * 128 + column).to(tl.float32)
            query = tl.load(q + at + key_head * 128 + column).to(tl.float32)
            key = key * tl.rsqrt(tl.sum(key * key) + 1e-6)
            query = query * (tl.rsqrt(tl.sum(query * query) + 1e-6) * scale)
            value = tl.load(v + at + head * 128 + row).to(tl.float32)
            gate = n * ba_n + t * ba_t + head
            g, beta = _gates(tl.load(a + gate), tl.load(b + gate), A, bias)
            S = S * tl.exp(g)
            u = beta * (value - tl.sum(S * key[None, :], 1))
            S = S + u[:, None] * key[None, :]
            y = tl.sum(S * query[None, :], 1)
            here = (n * T + t).to(tl.int64) * HV + head
            tl.store(out + here * 128 + row, y.to(out.dtype.element_ty))
            tl.store(states + here * 16384 + tile, S.to(states.dtype.element_ty))


@triton.jit
def _dot(x, y):  # noqa: ANN001, ANN202
    return tl.dot(x, y)


@triton.jit
def _two_terms(x, y):  # noqa: ANN001, ANN202
    """x y with x as two bf16 terms and y in bf16."""
    high = x.to(tl.bfloat16)
    low = (x - high.to(tl.float32)).to(tl.bfloat16)
    return _dot(high, y) + _dot(low, y)


@triton.jit
def _replay(  # noqa: ANN202
    q, k, v, a, b, A_log, dt_bias, state, rec_u, rec_k, rec_G,  # noqa: ANN001
    hist_len, bank, slot, out,  # noqa: ANN001
    qkv_n, qkv_t, ba_n, ba_t, slot_stride, state_slot, u_slot, k_slot, G_slot, scale,  # noqa: ANN001
    HK, HV,  # noqa: ANN001
    T: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The matrix form over checkpoint and records; sixteen rows hold the tokens, because that is
    the least that a product takes.
    """
    n, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s = tl.load(slot + n * slot_stride).to(tl.int64)
    ratio = HV // HK
    key_head = head // ratio
    column = tl.arange(0, 128)
    row = part * BV + tl.arange(0, BV)
    token = tl.arange(0, 16)
    new = token < T
    written = (n * T + token[:, None]) * HV * 128 + head * 128 + row[None, :]
    if s < 0:
        zero = tl.zeros((16, BV), out.dtype.element_ty)
        tl.store(out + written, zero, mask=new[:, None])
    else:
        P = tl.load(hist_len + s)
        c = tl.load(bank + s)
        live = token < P
        from_u = rec_u + s * u_slot + (head * 2 + c) * 2048
        from_k = rec_k + s * k_slot + (key_head * 2 + c) * 2048
        from_G = rec_G + s * G_slot + (head * 2 + c) * 16
        U = tl.load(from_u + token[:, None] * 128 + row[None, :], mask=live[:, None], other=0.0)
        K = tl.load(from_k + token[:, None] * 128 + column[None, :], mask=live[:, None], other=0.0)
        G = tl.load(from_G + token, mask=live, other=0.0)
        total = tl.sum(tl.where(token == P - 1, G, 0.0))
        weight = tl.where(live, tl.exp(total - G), 0.0)
        decay = tl.exp(total)
        tile = row[:, None] * 128 + column[None, :]
        to_state = state + s * state_slot + head * 16384 + tile
        S = tl.load(to_state)

        at = n * qkv_n + token[:, None] * qkv_t + key_head * 128 + column[None, :]
        key = tl.load(k + at, mask=new[:, None], other=0.0).to(tl.float32)
        query = tl.load(q + at, mask=new[:, None], other=0.0).to(tl.float32)
        key = (key * tl.rsqrt(tl.sum(key * key, 1) + 1e-6)[:, None]).to(tl.bfloat16)
        query = query * (tl.rsqrt(tl.sum(query * query, 1) + 1e-6) * scale)[:, None]
        query = query.to(tl.bfloat16)
        at = n * qkv_n + token[:, None] * qkv_t + head * 128 + row[None, :]
        value = tl.load(v + at, mask=new[:, None], other=0.0).to(tl.float32)
        gate = n * ba_n + token * ba_t + head
        g, beta = _gates(
            tl.load(a + gate, mask=new, other=0.0),
            tl.load(b + gate, mask=new, other=0.0),
            tl.load(A_log + head),
            tl.load(dt_bias + head),
        )
        since = tl.cumsum(tl.where(new, g, 0.0), 0)

        high = S.to(tl.bfloat16)
        S_t = tl.trans(high)
        of_key = _dot(key, S_t)
        of_query = _dot(query, S_t)
        if state.dtype.element_ty == tl.float32:
            low_t = tl.trans((S - high.to(tl.float32)).to(tl.bfloat16))
            of_key += _dot(key, low_t)
            of_query += _dot(query, low_t)
        K_t = tl.trans(K)
        of_key = decay * of_key + _two_terms(_dot(key, K_t) * weight[None, :], U)
        of_query = decay * of_query + _two_terms(_dot(query, K_t) * weight[None, :], U)

        key_t = tl.trans(key)
        behind = since[:, None] - since[None, :]
        causal = token[:, None] >= token[None, :]
        D = tl.exp(tl.where(causal, behind, 0.0))
        A = beta[:, None] * D * _dot(key, key_t)
        A = tl.where(token[:, None] > token[None, :], A, 0.0)
        B = tl.where(causal, D * _dot(query, key_t), 0.0)
        u = beta[:, None] * (value - tl.exp(since)[:, None] * of_key)
        y = tl.exp(since)[:, None] * of_query
        for i in tl.static_range(T):
            this = tl.sum(tl.where(token[:, None] == i, u, 0.0), 0)
            y += tl.sum(tl.where(token[None, :] == i, B, 0.0), 1)[:, None] * this[None, :]
            u -= tl.sum(tl.where(token[None, :] == i, A, 0.0), 1)[:, None] * this[None, :]
        tl.store(out + written, y.to(out.dtype.element_ty), mask=new[:, None])

        commits = P + T > 16
        into = tl.where(commits, 1 - c, c)
        first = tl.where(commits, 0, P)
        base = tl.where(commits, 0.0, total)
        to = first + token
        to_u = rec_u + s * u_slot + (head * 2 + into) * 2048
        tl.store(to_u + to[:, None] * 128 + row[None, :], u.to(tl.bfloat16), mask=new[:, None])
        if part == 0:
            tl.store(rec_G + s * G_slot + (head * 2 + into) * 16 + to, base + since, mask=new)
            if head % ratio == 0:
                to_k = rec_k + s * k_slot + (key_head * 2 + into) * 2048
                tl.store(to_k + to[:, None] * 128 + column[None, :], key, mask=new[:, None])
        if commits:
            weighted = tl.trans(U.to(tl.float32) * weight[:, None])
            folded = decay * S.to(tl.float32) + _two_terms(weighted, K)
            tl.store(to_state, folded.to(state.dtype.element_ty))


def snapshots(
    step: dict[str, torch.Tensor], states: torch.Tensor, block: int = 32, warps: int = 4
) -> None:
    """Launch over a step's tensors; ``states`` is [N, T, HV, 128, 128]."""
    q, v, a = step["q"], step["v"], step["a"]
    names = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "slot", "out")
    _snapshots[(q.shape[0], v.shape[2], HEAD // block)](
        *(step[name] for name in names), states, q.stride(0), q.stride(1), a.stride(0), a.stride(1),
        step["slot"].stride(0), step["state"].stride(0), HEAD**-0.5,
        q.shape[2], v.shape[2], q.shape[1], block, num_warps=warps,
    )  # fmt: skip


def replay(step: dict[str, torch.Tensor], block: int = 32, warps: int = 4) -> None:
    """Launch over a step's tensors, with the meaning of ``gdn_replay.verify``."""
    q, v, a = step["q"], step["v"], step["a"]
    names: tuple[str, ...] = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state")
    names += ("rec_u", "rec_k", "rec_G", "hist_len", "bank", "slot", "out")
    pools: list[Any] = [step[n].stride(0) for n in ("slot", "state", "rec_u", "rec_k", "rec_G")]
    _replay[(q.shape[0], v.shape[2], HEAD // block)](
        *(step[name] for name in names), q.stride(0), q.stride(1), a.stride(0), a.stride(1),
        *pools, HEAD**-0.5, q.shape[2], v.shape[2], q.shape[1], block, num_warps=warps,
    )  # fmt: skip
