"""Where the compiler finds the family's plans."""

from __future__ import annotations

from specplan.kernels.sparse_gqa_verify.lower import lower

__all__ = ["lower"]
