"""Planning rule of ``gdn_replay``: how many CTAs share a head's value rows, and how many heads one
CTA takes together.

A head's 128 value rows are independent of each other, so any of 1, 2, 4 or 8 CTAs may share them;
what each part repeats is the work on keys, queries and the history's keys. Few heads need splits to
spread the state over the device, many heads want none, and very many also share that work among the
value heads of a key head. The result is the same bits for every choice.

The figures behind the constants: H200, CUDA graphs of calls over 768 slots of 16/32 heads, T = 4,
bf16 state, plain and commit steps weighted 0.773 and 0.227, microseconds by splits::

    requests   1, grouped      1      2      4      8
           1          5.6    3.9    3.6    3.7    3.4
           8          8.1    7.8    7.2    9.6   12.2
          32         19.1   20.5   21.8   30.7   37.2
          64         33.1   37.0   38.8   57.3   68.9
         256          114    127    137    213    230
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan

HEAD = 128
SPLITS = (1, 2, 4, 8)
#: Compiled token capacities: a launch of T tokens takes the smallest that holds it.
TOKENS = (4, 8)
ELEMENT = {"bf16": 2, "fp32": 4}
#: Value rows of one warp and warps of one CTA, by splits: rows * warps * splits = 128.
SHAPE = {1: (32, 4), 2: (16, 4), 4: (8, 4), 8: (8, 2)}
#: Splits are doubled while the CTAs are no more than this times the SMs.
CTAS_PER_SM = 4
#: Resident CTAs an SM that the registers of a shape allow without spills: 128 a thread, 168 with 32
#: rows a warp.
RESIDENT = {1: 3, 2: 4, 4: 4, 8: 6}
#: The same where heads are grouped, with up to 255 registers: 114 us at 256 requests, where three
#: CTAs with 168 registers took 125.
RESIDENT_GROUPED = 2
#: Shared memory of a CTA besides its part of the state: K_hist and the operand of keys and queries,
#: 16 x 128 bf16 each.
OPERANDS = 2 * 16 * HEAD * 2
#: What the driver reserves of an SM's shared memory for each CTA.
RESERVED = 1024


def shared_memory(dtype: str, splits: int) -> int:
    """Bytes of one CTA: two buffers for its part of a head's state, and the operands."""
    return 2 * (HEAD // splits) * HEAD * ELEMENT[dtype] + OPERANDS


def resident(dtype: str, splits: int, grouped: bool, arch: Arch) -> int:
    """CTAs that one SM of ``arch`` holds at a time."""
    by_registers = RESIDENT_GROUPED if grouped else RESIDENT[splits]
    return max(1, min(by_registers, arch.smem_per_sm // (shared_memory(dtype, splits) + RESERVED)))


def is_grouped(
    geometry: Mapping[str, int], requests: int, splits: int, dtype: str, arch: Arch
) -> bool:
    """Whether a CTA takes all value heads of a key head: where that still gives every resident CTA
    work.

    Only for states of 16 bits without splits: with a wider state the two forms took the same time.
    """
    ratio = geometry["value_heads"] // geometry["key_heads"]
    if ratio == 1 or splits > 1 or ELEMENT[dtype] > 2:
        return False
    return requests * geometry["key_heads"] >= RESIDENT_GROUPED * arch.sm_count


@dataclass(frozen=True)
class GdnReplay:
    """See ``specplan.plans.family.Family``. Heads of 128, a history window of 16 tokens."""

    name: str = "gdn_replay"
    ops: tuple[str, ...] = ("verify", "advance", "materialize", "reset")
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    geometry: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"key_heads": (1, 64), "value_heads": (1, 256)}
    )

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        """Why these values do not fit together, or None."""
        keys, values = geometry["key_heads"], geometry["value_heads"]
        if values % keys:
            return f"value_heads {values} is not a multiple of key_heads {keys}"
        return None

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        """A verify step has up to 8 tokens a request, whatever the geometry."""
        return None if tokens <= 8 else f"{tokens} tokens a request, at most 8"

    def splits(
        self, geometry: Mapping[str, int], requests: int, tokens: int, dtype: str, arch: Arch
    ) -> int:
        """The most splits whose CTAs stay within a few for each SM; at least 2 for a state wider
        than 16 bits.

        (Two buffers of an unsplit head of fp32 leave one CTA an SM: 85 us against 60 at 64
        requests.)
        """
        heads = requests * geometry["value_heads"]
        least = 2 if ELEMENT[dtype] > 2 else 1
        fitting = [n for n in SPLITS if n >= least and heads * n <= CTAS_PER_SM * arch.sm_count]
        return fitting[-1] if fitting else least

    def plans(
        self,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        arch: Arch,
    ) -> tuple[Plan, ...]:
        """One plan for each op. Geometry, requests and tokens are run-time shapes: cells differ in
        few compiled functions.
        """
        if splits not in SPLITS:
            raise ValueError(f"splits {splits} is not one of {SPLITS}")
        if not 1 <= tokens <= TOKENS[-1]:
            raise ValueError(f"tokens {tokens} is not in 1..{TOKENS[-1]}")
        rows, warps = SHAPE[splits]
        grouped = is_grouped(geometry, requests, splits, dtype, arch)
        held = resident(dtype, splits, grouped, arch)
        ratio = geometry["value_heads"] // geometry["key_heads"]
        verify = Plan(
            self.name,
            "verify",
            arch.name,
            spec=(
                ("state", dtype),
                ("tokens", next(t for t in TOKENS if t >= tokens)),
                ("rows", rows),
                ("warps", warps),
                ("grouped", grouped),
                ("resident", held),
            ),
            launch=(("heads", ratio if grouped else 1), ("ctas", held * arch.sm_count)),
        )
        return (
            verify,
            Plan(self.name, "advance", arch.name, spec=()),
            Plan(self.name, "materialize", arch.name, spec=(("state", dtype),)),
            Plan(self.name, "reset", arch.name, spec=()),
        )


FAMILY = GdnReplay()
