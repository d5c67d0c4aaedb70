"""Picking a plan, and what a declined call says."""

from __future__ import annotations

import pytest

from support import packs

torch = pytest.importorskip("torch")

import specplan  # noqa: E402
from specplan import Reason, Uncertified  # noqa: E402


@pytest.fixture(scope="module")
def real(small_pack: packs.SmallPack) -> specplan.Pack:
    return specplan.load(small_pack.root, arch=packs.ARCH)


def declined(answer: object) -> Uncertified:
    assert isinstance(answer, Uncertified)
    assert not answer
    return answer


def test_a_cell_is_picked_by_problem_and_by_geometry(real: specplan.Pack) -> None:
    named = real.scatter.pick(requests=3, tokens=2, problem="mtp7")
    spelt = real.scatter.pick(requests=3, tokens=2, history=8, next=8, draft=7)
    assert not isinstance(named, Uncertified)
    assert named == spelt
    assert named.plan.symbol == "scatter__history8__next8__draft7__lanes8__sm_90a"
    assert named.certified
    assert (named.cell.problem, named.cell.requests, named.cell.tokens) == ("mtp7", 3, 2)
    assert (named.cell.splits, named.cell.dtype, named.cell.arch) == (1, "int32", "sm_90a")
    explicit = real.scatter.pick(
        requests=3, tokens=2, problem="mtp7", splits=1, dtype="int32", arch="sm_90a"
    )
    assert explicit == named


def test_tokens_choose_the_plan_of_gather(real: specplan.Pack) -> None:
    picked = [real.gather.pick(requests=1, tokens=t, problem="mtp3") for t in (2, 3, 4)]
    lanes = [dict(p.plan.spec)["lanes"] for p in picked if not isinstance(p, Uncertified)]
    assert lanes == [2, 4, 4]


def test_every_cell_of_the_pack_is_picked_as_itself(real: specplan.Pack) -> None:
    manifest = real.manifest()
    count = 0
    for cell, group in manifest.cells():
        answer = getattr(real, cell.family).pick(
            requests=cell.requests, tokens=cell.tokens, problem=cell.problem
        )
        if group.certified:
            assert answer.cell == cell
            assert answer.plan.symbol == group.uses[0].symbol
            count += 1
        else:
            assert declined(answer).reason is Reason.CANDIDATE
    assert count == 4 * 4 + 8 * 4 + 3 * 4


def test_candidates_run_only_where_they_are_asked_for(
    real: specplan.Pack, small_pack: packs.SmallPack
) -> None:
    answer = declined(real.scatter.pick(requests=5, tokens=2, problem="mtp3"))
    assert answer.reason is Reason.CANDIDATE
    assert "specplan.load(candidates=True)" in str(answer)
    assert "specplan certify" in str(answer)
    willing = specplan.load(small_pack.root, arch=packs.ARCH, candidates=True)
    picked = willing.scatter.pick(requests=5, tokens=2, problem="mtp3")
    assert not isinstance(picked, Uncertified)
    assert not picked.certified
    certified = willing.scatter.pick(requests=4, tokens=2, problem="mtp3")
    assert not isinstance(certified, Uncertified)
    assert certified.certified


def test_a_cell_that_is_not_there_names_the_nearest_certified_ones(real: specplan.Pack) -> None:
    answer = declined(real.scatter.pick(requests=64, tokens=3, problem="mtp3"))
    assert (answer.reason, answer.family, answer.arch) == (
        Reason.NOT_IN_CATALOG,
        "scatter",
        "sm_90a",
    )
    assert answer.cell is not None
    assert (answer.cell.requests, answer.cell.tokens) == (64, 3)
    nearest = list(answer.nearest)
    assert len(nearest) == 3
    # Requests 5 are nearer and no certificate covers them.
    assert (nearest[0].problem, nearest[0].requests, nearest[0].tokens) == ("mtp3", 4, 3)
    assert all(real.manifest().find(cell).certified for cell in nearest)
    text = str(answer)
    assert text.startswith("scatter on sm_90a declined: no cell scatter mtp3 requests=64 tokens=3")
    assert f"nearest certified: {nearest[0]}" in text
    assert "not_in_catalog" in repr(answer)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"problem": "mtp4"}, "no problem 'mtp4'; problems: mtp3, mtp7"),
        (
            {"history": 4, "next": 5, "draft": 3},
            "history=4, next=5, draft=3; problems: mtp3, mtp7",
        ),
    ],
)
def test_an_unknown_problem_names_the_known_ones(
    real: specplan.Pack, named: dict[str, object], said: str
) -> None:
    answer = declined(real.scatter.pick(requests=1, tokens=1, **named))
    assert answer.reason is Reason.UNKNOWN_PROBLEM
    assert said in str(answer)


@pytest.mark.parametrize(
    "named", [{"splits": 2}, {"dtype": "int64"}, {"requests": 0}, {"tokens": 5}, {"tokens": 0}]
)
def test_other_splits_dtypes_and_sizes_are_not_in_the_catalog(
    real: specplan.Pack, named: dict[str, object]
) -> None:
    call = {"requests": 1, "tokens": 1, "problem": "mtp3", **named}
    answer = declined(real.scatter.pick(**call))
    assert answer.reason is Reason.NOT_IN_CATALOG
    assert answer.nearest


@pytest.mark.parametrize(
    "named", [{}, {"history": 4}, {"history": 4, "next": 4, "draft": 3, "page": 1}]
)
def test_half_a_geometry_is_a_mistake_of_the_caller(
    real: specplan.Pack, named: dict[str, int]
) -> None:
    with pytest.raises(TypeError, match="by name or by history, next, draft"):
        real.scatter.pick(requests=1, tokens=1, **named)


def test_calling_a_declined_answer_raises_its_reason(real: specplan.Pack) -> None:
    answer = declined(real.scatter.pick(requests=64, tokens=3, problem="mtp3"))
    with pytest.raises(specplan.UncertifiedCell) as caught:
        answer(1, name=2)
    assert caught.value.uncertified is answer
    assert caught.value.reason == "not_in_catalog"
    assert str(caught.value) == str(answer)


def test_tensors_on_the_cpu_are_declined_with_the_loaded_archs(real: specplan.Pack) -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    stores = (zeros(4, 6, 1), zeros(4, 6, 1), zeros(6), zeros(6, 3))
    answer = declined(
        real.scatter(zeros(2, 3), zeros(2, 3), zeros(2), zeros(2, 2), zeros(2), *stores, 0, 2)
    )
    assert answer.reason is Reason.DEVICE
    assert "the tensors are on the CPU, the loaded packs are for sm_90a" in str(answer)
    assert not any(store.any() for store in stores)


def test_the_compiled_modules_refuse_wrong_calls_before_any_cuda_call(real: specplan.Pack) -> None:
    """Nothing here has a GPU: a call that came as far as CUDA would fail with a CUDA error."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    picked = real.scatter.pick(requests=1, tokens=1, problem="mtp3")
    assert not isinstance(picked, Uncertified)
    signature = picked.plan.signature.partition("(")[0]
    good = [zeros(2, 4), zeros(2, 4), zeros(2), zeros(2, 3), zeros(2)]
    good += [zeros(4, 6, 1), zeros(4, 6, 1), zeros(6), zeros(6, 3)]
    for arguments in ((), (*good, 0, 1), (*good, 0, 1, 4, 2)):
        with pytest.raises(TypeError, match=signature):
            picked.function(*arguments)
    with pytest.raises((TypeError, ValueError), match=r"[Dd]evice"):
        picked.function(*good, 0, 1, 4)
    for index, wrong, said in (
        (0, zeros(2), "new_tokens"),
        (4, zeros(2).long(), "slots"),
        (5, zeros(5, 6, 1), "store_new_tokens"),
        (8, None, "store_next_draft"),
    ):
        spoilt = [*good[:index], wrong, *good[index + 1 :], 0, 1, 4]
        with pytest.raises((TypeError, ValueError), match=said):
            picked.function(*spoilt)
    assert not any(tensor.any() for tensor in good)
