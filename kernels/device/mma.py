"""Tensor-core products of one warp."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32
from specplan.kernels.device.ptx import emit


def mma_bf16(acc: Sequence[Float32], a: Sequence[Int32], b: Sequence[Int32]) -> list[Float32]:
    """acc[16 x 8] + a[16 x 16] b[16 x 8], bf16 operands, fp32 accumulators (``mma.sync`` m16n8k16).

    Lane 4g + t holds rows g and g+8: a = (row g, k 2t..), (g+8, 2t..), (g, 2t+8..), (g+8, 2t+8..);
    b = (k 2t.., column g), (k 2t+8.., column g); acc = (g, column 2t), (g, 2t+1), (g+8, 2t), (g+8,
    2t+1).
    """
    return emit(
        [Float32] * 4,
        [*a, *b, *acc],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
    )
