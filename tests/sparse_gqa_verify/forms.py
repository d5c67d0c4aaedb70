"""The compiled forms of ``sparse_gqa_verify``, by what tells them apart."""

from __future__ import annotations

from specplan.plans.plan import Plan


def plan_of(dtype: str, m_tiles: int, arch: str = "sm_90a") -> Plan:
    name = "sparse_gqa_verify"
    return Plan(name, name, arch, (("dtype", dtype), ("m_tiles", m_tiles)))
