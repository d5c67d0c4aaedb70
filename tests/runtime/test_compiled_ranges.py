"""What the compiled functions of scatter and gather refuse by themselves, asked without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from support import packs

torch = pytest.importorskip("torch")

import specplan  # noqa: E402
from specplan import Reason  # noqa: E402

from support.recorder import Recorder  # noqa: E402  isort: skip
from test_runtime_calls import CALLS, scatter_call, zeros  # noqa: E402  isort: skip


@pytest.fixture
def recorded(
    pack: specplan.Pack, small_pack: packs.SmallPack, tmp_path: Any
) -> tuple[specplan.Pack, Recorder]:
    """The small pack on an imagined device, with its compiled functions."""
    recorder = Recorder(small_pack.directory, tmp_path / "recorder")
    pack._packs[packs.ARCH].functions = dict(recorder.functions)
    pack._prepared |= {(0, "scatter"), (0, "gather")}
    return pack, recorder


#: Every bound of every range, one past it on each side; the calls as made end where their tensors
#: end.
OUTSIDE: list[tuple[str, dict[str, Any]]] = [
    ("scatter", {"row_begin": -1}),
    ("scatter", {"row_begin": 4}),
    ("scatter", {"row_begin": 2**31 - 1}),
    ("scatter", {"row_begin": 1 << 40}),
    ("scatter", {"rows": -1}),
    ("scatter", {"slots": zeros(2)}),
    *(
        ("gather", {f"{name}_begin": begin})
        for name, end in (
            ("input_ids", 5),
            ("draft_tokens", 2),
            ("pos_offsets", 1),
            ("kv_offsets", 3),
        )
        for begin in (-1, end + 1, 2**31 - 1, -(2**31))
    ),
    ("gather", {"slots": zeros(2)}),
    ("gather", {"pos_indices": zeros(11)}),
    ("gather", {"requests": -1}),
    ("gather", {"drafts": -1}),
    ("gather", {"drafts": 4}),
]


@pytest.mark.parametrize(("family", "changes"), OUTSIDE)
def test_a_range_outside_its_tensor_is_refused_by_the_compiled_function_too(
    recorded: tuple[specplan.Pack, Recorder], family: str, changes: dict[str, Any]
) -> None:
    pack, recorder = recorded
    op = getattr(pack, family)
    assert op(**CALLS[family]()) is True
    before = recorder.count()
    assert before == 1
    # The call as the hot path makes it, by what the good call left behind.
    (function,) = [f for f in recorder.functions.values() if f.launches]
    call = {**CALLS[family](), **changes}
    arguments = [*call.values(), *([3] if family == "scatter" else [])]
    # The class of a CUDA error depends on whether the compiler is in the process. An integer that
    # does not fit 32 bits is refused before.
    wide = max(abs(value) for value in call.values() if isinstance(value, int)) > 2**31
    with pytest.raises(Exception, match="row_begin" if wide else "77001"):
        function(*arguments)
    answer = op(**call)
    assert not answer and answer.reason is Reason.RANGE, answer
    assert recorder.count() == before, "nothing was launched"


def test_a_width_that_the_plan_was_not_picked_for_is_looked_up_again(
    recorded: tuple[specplan.Pack, Recorder],
) -> None:
    """Outputs of 6 x 2 and of 4 x 3 have as many elements, which is all that the hot path reads."""
    pack, recorder = recorded
    for width, held in ((2, 6), (3, 4), (3, 4), (2, 6)):
        assert pack.scatter(**scatter_call(width, held)) is True
    (function,) = [f for f in recorder.functions.values() if f.launches]
    assert [launch[-1] for launch in function.launches] == [2, 3, 3, 2]


@pytest.mark.parametrize("family", ["scatter", "gather"])
def test_a_good_call_launches_its_grid(
    recorded: tuple[specplan.Pack, Recorder], family: str
) -> None:
    pack, recorder = recorded
    assert getattr(pack, family)(**CALLS[family]()) is True
    assert recorder.last() == (1, (1, 1, 1), (128, 1, 1))
