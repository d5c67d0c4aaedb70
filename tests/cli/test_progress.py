"""The build's progress bar keeps its counts and its time on a narrow terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from specplan.tools.cli.build import _bar

SYMBOL = "gdn_replay_verify__state_bf16__tokens8__rows32__warps4__grouped_on__resident2__sm_103a"


def drawn(width: int) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    bar = _bar(console)
    task = bar.add_task("plans", total=1234, symbol="")
    bar.update(task, completed=567, symbol=SYMBOL)
    console.print(bar.get_renderable())
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 50, 60, 80, 100, 160, 240])
def test_counts_and_time_left_are_whole_and_on_one_line(width: int) -> None:
    (line,) = drawn(width)
    assert len(line) <= width
    assert " 567/1234 -:--:-- " in line
    assert line.startswith("compiling ")


def test_a_wide_terminal_shows_the_whole_symbol() -> None:
    assert SYMBOL in drawn(240)[0]
    assert SYMBOL[:10] in drawn(60)[0]
