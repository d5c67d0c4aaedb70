"""Plans: a symbol is a C identifier of one plan, and a missing constant says what there is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specplan.plans.families import FAMILIES
from specplan.plans.plan import Constant, Plan

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Few letters, so that names and values run together often.
NAMES = st.text("am1_", min_size=1, max_size=3)
CONSTANTS = st.one_of(st.booleans(), st.integers(-12, 12), st.text("am1_on", max_size=3))
SPECS = st.lists(st.tuples(NAMES, CONSTANTS), max_size=3).map(tuple)


def plan(*spec: tuple[str, Constant], op: str = "scatter", arch: str = "sm_90a") -> Plan:
    return Plan("scatter", op, arch, spec)


def meaning(of: Plan) -> tuple[object, ...]:
    """A plan without its launch parameters, with True told from 1."""
    return of.family, of.op, of.arch, tuple((name, type(v), v) for name, v in of.spec)


def test_symbols_of_all_reachable_plans_are_injective_identifiers(
    reachable: frozenset[tuple[str, str, Plan]],
) -> None:
    symbols: dict[str, tuple[object, ...]] = {}
    for _, _, each in reachable:
        assert symbols.setdefault(each.symbol, meaning(each)) == meaning(each)
    assert len(symbols) == len(set(symbols.values()))
    assert len(symbols) >= 4 * (10 + 10)
    for symbol in symbols:
        assert IDENTIFIER.fullmatch(symbol), symbol
        # File names, such as the logs', end at 255 bytes.
        assert len(symbol) <= 240


def test_every_plan_names_its_family_op_and_arch(
    reachable: frozenset[tuple[str, str, Plan]],
) -> None:
    for family, arch, each in reachable:
        assert (each.family, each.arch) == (family, arch)
        assert each.op in FAMILIES[family].ops
        assert each.symbol.startswith(family)
        assert each.symbol.endswith(f"__{arch}")


@given(st.sampled_from(["a", "a_b", "b"]), st.sampled_from(["a", "b", "b_a"]), SPECS, SPECS)
def test_two_plans_never_share_a_symbol(
    family: str,
    op: str,
    left: tuple[tuple[str, Constant], ...],
    right: tuple[tuple[str, Constant], ...],
) -> None:
    """Either every plan has its own symbol, or the second one of a spelling is refused."""
    plans = [Plan(family, op, "sm_90a", spec) for spec in (left, right)]
    plans += [Plan("a", op, "sm_90a", left), Plan("a", "a", "sm_90a", right)]
    seen: dict[str, tuple[object, ...]] = {}
    for each in plans:
        try:
            symbol = each.symbol
        except ValueError as error:
            assert "spell" in str(error)
            continue
        assert IDENTIFIER.fullmatch(symbol)
        assert seen.setdefault(symbol, meaning(each)) == meaning(each)


def test_a_second_plan_of_one_spelling_is_refused_with_both_named() -> None:
    first = plan(("collide", 12))
    assert first.symbol == "scatter__collide12__sm_90a"
    with pytest.raises(ValueError, match="two plans spell 'scatter__collide12__sm_90a'") as caught:
        _ = plan(("collide1", 2)).symbol
    assert "('collide', 12)" in str(caught.value)
    assert "('collide1', 2)" in str(caught.value)
    assert first.symbol == "scatter__collide12__sm_90a"


def test_how_constants_are_spelled() -> None:
    spelled = plan(("rows", 8), ("shift", -3), ("early", True), ("late", False), ("index", "int32"))
    assert spelled.symbol == "scatter__rows8__shiftm3__early_on__late_off__index_int32__sm_90a"
    assert plan(op="undo").symbol == "scatter_undo__sm_90a"


def test_one_is_not_spelled_as_true_whichever_came_first() -> None:
    assert plan(("flag", 1)).symbol == "scatter__flag1__sm_90a"
    assert plan(("flag", True)).symbol == "scatter__flag_on__sm_90a"
    assert plan(("other", False)).symbol == "scatter__other_off__sm_90a"
    assert plan(("other", 0)).symbol == "scatter__other0__sm_90a"


def test_launch_parameters_are_not_in_the_symbol() -> None:
    spec = (("rows", 8),)
    launched = Plan("scatter", "scatter", "sm_90a", spec, (("ctas", 4),))
    assert launched.symbol == Plan("scatter", "scatter", "sm_90a", spec).symbol
    assert launched != Plan("scatter", "scatter", "sm_90a", spec, (("ctas", 5),))


@pytest.mark.parametrize("value", ["a-b", "a b", "é", "a.b", "a\n"])
def test_what_spells_no_identifier_is_an_error(value: str) -> None:
    with pytest.raises(ValueError, match="do not spell a C identifier"):
        _ = plan(("index", value)).symbol


def test_constants_are_found_by_name_in_spec_and_launch() -> None:
    both = Plan("scatter", "scatter", "sm_90a", (("rows", 8), ("index", "int64")), (("ctas", 4),))
    assert (both["rows"], both["index"], both["ctas"]) == (8, "int64", 4)
    assert both.int("ctas") == 4


def test_a_missing_constant_says_what_there_is() -> None:
    both = Plan("scatter", "scatter", "sm_90a", (("rows", 8),), (("ctas", 4),))
    with pytest.raises(KeyError) as caught:
        _ = both["lanes"]
    assert caught.value.args == ("plan of 'scatter' has no constant 'lanes'; it has: rows, ctas",)


def test_a_text_is_no_integer() -> None:
    with pytest.raises(
        TypeError, match=r"constant 'index' of scatter__index_int64__sm_90a is 'int64'"
    ):
        plan(("index", "int64")).int("index")
