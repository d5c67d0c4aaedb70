"""The entry of the build: ``lower(plan)``."""

from __future__ import annotations

from specplan.kernels.gdn_replay.lower import lower

__all__ = ["lower"]
