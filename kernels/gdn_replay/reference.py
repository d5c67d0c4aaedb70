"""References of ``gdn_replay`` in plain torch: they run on a CPU or a GPU, in place, with the ops'
own arguments.

A sequence's state is a *checkpoint* S0 in ``state`` plus the records of the ``P = hist_len[slot]``
tokens that were accepted since, in bank ``c = bank[slot]`` of the record pools::

    S_P = e^(G_P) S0 + sum_j e^(G_P - G_j) u_j k_j^T         j < P, G cumulative log decay, u the
    corrected delta vector

====================  ======================  ====================================================
tensor                shape                   meaning
====================  ======================  ====================================================
q, k                  [N, T, HK, 128]         raw; L2-normalised here, q additionally scaled
v                     [N, T, HV, 128]
a, b                  [N, T, HV]              raw: g = -exp(A_log) softplus(a + dt_bias),
                                              beta = sigmoid(b)
A_log, dt_bias        [HV]
state                 [slots, HV, V, K]       checkpoint
rec_u                 [slots, HV, 2, W, V]    corrected delta vectors of the history, two banks of
                                              W rows
rec_k                 [slots, HK, 2, W, K]    normalised keys of the history
rec_G                 [slots, HV, 2, W]       cumulative log decay of the history
hist_len, bank        [slots]                 cursors, read only; ``advance`` moves them once a step
slot                  [N]                     -1 marks a padding row
out                   [N, T, HV, 128]         zeros for padding rows
====================  ======================  ====================================================

A row *commits* when ``P + T > W``: its accepted history is folded into the checkpoint and the T new
records start the other bank. Value head h reads key head ``h // (HV // HK)``. All arithmetic is
done in ``compute``; what is stored is rounded to the dtype of the buffer that it is stored in, so
float64 buffers make an unrounded oracle.

``verify`` walks the tokens one by one and is the definition. ``verify_wy`` is the matrix form that
the kernel evaluates, with the kernel's roundings; the two agree to the rounding of ``compute``
where these are turned off by wide buffers and operands. ``verify_exact`` is that: the definition's
results, for a fraction of its memory traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Added to the sum of squares, inside the root.
NORM_EPS = 1e-6
#: Above this, softplus(x) is x: the branch is taken before exp, which would overflow.
SOFTPLUS_LINEAR = 20.0


def gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, compute: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Log decay g <= 0 and write strength beta in (0, 1), both in ``compute`` and never rounded
    further.
    """
    x = a.to(compute) + dt_bias.to(compute)
    linear = x > SOFTPLUS_LINEAR
    softplus = torch.where(linear, x, torch.log1p(torch.exp(torch.where(linear, 0.0, x))))
    return -torch.exp(A_log.to(compute)) * softplus, torch.sigmoid(b.to(compute))


def unit(x: Tensor, compute: torch.dtype, scale: float = 1.0) -> Tensor:
    """x / sqrt(sum(x^2) + eps) * scale over the last dimension."""
    wide = x.to(compute)
    return wide * (torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS) * scale)


@dataclass(frozen=True)
class History:
    """The live records of the rows, masked by selection: a dead row may hold NaN and does not
    matter.
    """

    length: Tensor  # [n] P
    weight: Tensor  # [n, HV, W]  e^(G_P - G_j), 0 where dead
    decay: Tensor  # [n, HV]  e^(G_P), 1 without history
    total: Tensor  # [n, HV]  G_P, 0 without history
    u: Tensor  # [n, HV, W, V]
    k: Tensor  # [n, HK, W, K]


def history(
    rec_u: Tensor,
    rec_k: Tensor,
    rec_G: Tensor,
    slot: Tensor,
    bank: Tensor,
    length: Tensor,
    compute: torch.dtype,
) -> History:
    """The first ``length`` records of bank ``bank`` of ``slot`` (all [n], long)."""
    window = rec_G.shape[-1]
    live = torch.arange(window, device=slot.device) < length[:, None]
    G = torch.where(live[:, None], rec_G[slot, :, bank].to(compute), 0.0)
    last = (length - 1).clamp(min=0)[:, None, None].expand(-1, G.shape[1], 1)
    total = G.gather(-1, last).squeeze(-1)
    weight = torch.where(live[:, None], torch.exp(total[..., None] - G), 0.0)
    u = torch.where(live[:, None, :, None], rec_u[slot, :, bank].to(compute), 0.0)
    k = torch.where(live[:, None, :, None], rec_k[slot, :, bank].to(compute), 0.0)
    return History(length, weight, torch.exp(total), total, u, k)


def fold(checkpoint: Tensor, past: History) -> Tensor:
    """The state after the whole history: e^(G_P) S0 + sum_j w_j u_j k_j^T."""
    ratio = past.u.shape[1] // past.k.shape[1]
    k = past.k.repeat_interleave(ratio, dim=1)
    written = (past.weight[..., None] * past.u).transpose(-1, -2) @ k
    return past.decay[..., None, None] * checkpoint.to(written.dtype) + written


def _live_rows(slot: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.nonzero(slot >= 0).flatten()
    return rows, slot[rows].long()


def _append(
    records: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor, Tensor, Tensor],
    slot: Tensor,
    past: History,
    bank: Tensor,
) -> Tensor:
    """Store the T new records of every row; returns which rows commit."""
    rec_u, rec_k, rec_G = records
    u, k, cumulative = new
    tokens, window = u.shape[1], rec_G.shape[-1]
    commits = past.length + tokens > window
    base = torch.where(commits[:, None], 0.0, past.total)
    to_bank = torch.where(commits, 1 - bank, bank)[:, None]
    to_row = torch.where(commits, 0, past.length)[:, None]
    to_row = to_row + torch.arange(tokens, device=slot.device)
    at = slot[:, None].expand_as(to_row), to_bank.expand_as(to_row), to_row
    rec_u[at[0], :, at[1], at[2]] = u.to(rec_u.dtype)
    rec_k[at[0], :, at[1], at[2]] = k.to(rec_k.dtype)
    rec_G[at[0], :, at[1], at[2]] = (base[:, None] + cumulative).to(rec_G.dtype)
    return commits


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rec_u: Tensor,
    rec_k: Tensor,
    rec_G: Tensor,
    hist_len: Tensor,
    bank: Tensor,
    slot: Tensor,
    out: Tensor,
    scale: float | None = None,
    compute: torch.dtype = torch.float32,
) -> None:
    """The sequential definition: fold the history, then one token after another. It writes out,
    records and checkpoints.
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    ratio = v.shape[2] // k.shape[2]
    out[slot < 0] = 0
    rows, at = _live_rows(slot)
    c = bank[at].long()
    past = history(rec_u, rec_k, rec_G, at, c, hist_len[at].long(), compute)
    g, beta = gates(a[rows], b[rows], A_log, dt_bias, compute)
    keys = unit(k[rows], compute)
    wide_keys = keys.repeat_interleave(ratio, dim=2)
    queries = unit(q[rows], compute, scale).repeat_interleave(ratio, dim=2)
    values = v[rows].to(compute)

    checkpoint = S = fold(state[at], past)
    deltas = torch.zeros_like(values)
    for t in range(values.shape[1]):
        S = torch.exp(g[:, t])[..., None, None] * S
        k_t = wide_keys[:, t, :, :, None]
        u = beta[:, t, :, None] * (values[:, t] - (S @ k_t).squeeze(-1))
        S = S + u[..., None] * k_t.transpose(-1, -2)
        out[rows, t] = (S @ queries[:, t, :, :, None]).squeeze(-1).to(out.dtype)
        deltas[:, t] = u

    commits = _append((rec_u, rec_k, rec_G), (deltas, keys, g.cumsum(1)), at, past, c)
    state[at[commits]] = checkpoint[commits].to(state.dtype)


def split_bf16(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as the sum of two bf16 numbers (16 bits of significand), both in the dtype of x."""
    high = x.to(torch.bfloat16).to(x.dtype)
    return high, (x - high).to(torch.bfloat16).to(x.dtype)


def verify_wy(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rec_u: Tensor,
    rec_k: Tensor,
    rec_G: Tensor,
    hist_len: Tensor,
    bank: Tensor,
    slot: Tensor,
    out: Tensor,
    scale: float | None = None,
    compute: torch.dtype = torch.float32,
    operand: torch.dtype = torch.bfloat16,
) -> None:
    """The matrix form, with the kernel's roundings.

    Normalised q and k are rounded once to ``operand``; the checkpoint enters the products as two
    bf16 terms where it is wider than 16 bits; history weights times C, and times u at the commit,
    enter as two bf16 terms; everything else is ``compute``. With ``operand=compute`` nothing is
    rounded and the result is that of ``verify``.
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    tokens, ratio = v.shape[1], v.shape[2] // k.shape[2]
    out[slot < 0] = 0
    rows, at = _live_rows(slot)
    c = bank[at].long()
    past = history(rec_u, rec_k, rec_G, at, c, hist_len[at].long(), compute)
    g, beta = gates(a[rows], b[rows], A_log, dt_bias, compute)

    def two_terms(x: Tensor) -> Tensor:
        return x if operand == compute else sum(split_bf16(x), torch.zeros_like(x))

    keys = unit(k[rows], compute).to(operand).to(compute).transpose(1, 2)  # [n, HK, T, K]
    queries = unit(q[rows], compute, scale).to(operand).to(compute).transpose(1, 2)
    X = torch.cat((keys, queries), dim=2)  # [n, HK, 2T, K]
    C = (past.k @ X.transpose(-1, -2)).repeat_interleave(ratio, dim=1)  # [n, HV, W, 2T]
    M = (X @ keys.transpose(-1, -2)).repeat_interleave(ratio, dim=1)  # [n, HV, 2T, T]
    X = X.repeat_interleave(ratio, dim=1)

    S0 = state[at].to(compute)
    R = (S0 if state.element_size() == 2 else two_terms(S0)) @ X.transpose(-1, -2)  # [n, HV, V, 2T]
    H = past.decay[..., None, None] * R
    H = H + past.u.transpose(-1, -2) @ two_terms(past.weight[..., None] * C)

    cumulative = g.cumsum(1).transpose(1, 2)  # [n, HV, T]
    beta = beta.transpose(1, 2)
    behind = cumulative[..., :, None] - cumulative[..., None, :]  # c_t - c_s, used for s <= t only
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=slot.device).tril()
    D = torch.exp(torch.where(causal, behind, 0.0))
    A = torch.where(causal.tril(-1), beta[..., None] * D * M[:, :, :tokens], 0.0)
    B = torch.where(causal, D * M[:, :, tokens:], 0.0)
    since = torch.exp(cumulative)[..., None]
    values = v[rows].to(compute).transpose(1, 2)  # [n, HV, T, V]
    u = beta[..., None] * (values - since * H[..., :tokens].transpose(-1, -2))
    for s in range(tokens - 1):
        later = slice(s + 1, tokens)
        u[:, :, later] -= A[:, :, later, s, None] * u[:, :, s, None]
    y = since * H[..., tokens:].transpose(-1, -2) + B @ u
    out[rows] = y.transpose(1, 2).to(out.dtype)

    new = u.transpose(1, 2), keys.transpose(1, 2), g.cumsum(1)
    commits = _append((rec_u, rec_k, rec_G), new, at, past, c)
    wide_k = past.k[commits].repeat_interleave(ratio, dim=1)
    weighted = two_terms(past.weight[commits][..., None] * past.u[commits])
    folded = (
        past.decay[commits][..., None, None] * S0[commits] + weighted.transpose(-1, -2) @ wide_k
    )
    state[at[commits]] = folded.to(state.dtype)


#: Bytes of the states, in ``compute``, that ``verify_exact`` has at a time.
CHUNK = 128 << 20


def verify_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rec_u: Tensor,
    rec_k: Tensor,
    rec_G: Tensor,
    hist_len: Tensor,
    bank: Tensor,
    slot: Tensor,
    out: Tensor,
    scale: float | None = None,
    compute: torch.dtype = torch.float32,
) -> None:
    """``verify`` up to the rounding of ``compute``: the matrix form without its other roundings.

    It works on some rows at a time and reads a state once, where the definition reads and writes it
    for every token.
    """
    rows = max(1, CHUNK // (state[0].numel() * compute.itemsize))
    for at in range(0, slot.shape[0], rows):
        part = slice(at, at + rows)
        verify_wy(
            *(q[part], k[part], v[part], a[part], b[part], A_log, dt_bias),
            *(state, rec_u, rec_k, rec_G, hist_len, bank, slot[part], out[part]),
            scale=scale,
            compute=compute,
            operand=compute,
        )


def advance(
    hist_len: Tensor, bank: Tensor, slot: Tensor, n_acc: Tensor, tokens: int, window: int = 16
) -> None:
    """Move the cursors by ``n_acc`` accepted tokens of ``tokens`` verified ones, by the predicate
    of the kernel.

    On a row that committed hist_len is replaced even where n_acc is 0: its history is in the
    checkpoint already.
    """
    rows, at = _live_rows(slot)
    P, n = hist_len[at], n_acc[rows].to(hist_len.dtype)
    commits = P + tokens > window
    hist_len[at] = torch.where(commits, n, P + n)
    bank[at] = torch.where(commits, 1 - bank[at], bank[at])


def materialize(
    state: Tensor,
    rec_u: Tensor,
    rec_k: Tensor,
    rec_G: Tensor,
    bank: Tensor,
    src: Tensor,
    dst: Tensor,
    count: Tensor,
    compute: torch.dtype = torch.float32,
) -> None:
    """Write to ``state[dst]`` the state of ``src`` after the first ``count`` records of its live
    bank.

    Rows with a negative src or dst do nothing. Records, cursors and (unless dst is src) the
    checkpoint of src stay.
    """
    rows = torch.nonzero((src >= 0) & (dst >= 0)).flatten()
    at = src[rows].long()
    past = history(rec_u, rec_k, rec_G, at, bank[at].long(), count[rows].long(), compute)
    state[dst[rows].long()] = fold(state[at], past).to(state.dtype)


def reset(hist_len: Tensor, bank: Tensor, slot: Tensor) -> None:
    """Empty the history of the slots: no records, bank 0. The caller writes the checkpoint."""
    _, at = _live_rows(slot)
    hist_len[at] = 0
    bank[at] = 0
