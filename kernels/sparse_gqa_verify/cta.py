"""A CTA's share of the work."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, cute
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.kernels.sparse_gqa_verify.config import Form


class Cta(NamedTuple):
    """One CTA's share of the work."""

    smem: Int32
    thread: Int32
    warp: Int32
    lane: Int32
    row0: Int32
    rows: Int32
    kv_head: Int32
    group: Int32
    group_reciprocal: Int32
    split: Int32
    splits: Int32
    lists: cute.Tensor
    table: cute.Tensor
    page_size: Int32
    page_reciprocal: Int32
    pages: Int32
    interleaved: Int32


def save_cta(cta: Cta, form: Form) -> None:
    """Keeps in shared memory what the tile loop does not need, so that it takes no registers
    there.
    """
    at = cta.smem + form.share_at
    ptx.store_shared4(at, (cta.row0, cta.rows, cta.kv_head, cta.split))
    ptx.store_shared4(at + 16, (cta.splits, cta.group, cta.group_reciprocal, cta.page_reciprocal))


def restore_cta(cta: Cta, form: Form) -> Cta:
    """What ``save_cta`` kept. Thread numbers come back opaque: the compiler would otherwise compute
    what follows from them alone before all loops, and keep some hundred values in registers.
    """
    at = cta.smem + form.share_at
    row0, rows, kv_head, split = ptx.load_shared4(at)
    splits, group, group_reciprocal, page_reciprocal = ptx.load_shared4(at + 16)
    return cta._replace(
        thread=ptx.opaque(cta.thread),
        warp=ptx.opaque(cta.warp),
        lane=ptx.opaque(cta.lane),
        row0=row0,
        rows=rows,
        kv_head=kv_head,
        split=split,
        splits=splits,
        group=group,
        group_reciprocal=group_reciprocal,
        page_reciprocal=page_reciprocal,
    )
