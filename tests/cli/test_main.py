"""The command itself: what it lists, its version, and real exit codes of a real process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from specplan.plans.version import VERSION
from specplan.tools.cli import main

from support.synthetic import Place, specplan

COMMANDS = (
    *("build", "certify", "coverage", "doctor", "explain", "gc", "list", "simulate", "size"),
    "verify",
)


def test_help_lists_every_command_with_a_line() -> None:
    ran = specplan("--help")
    assert ran.code == 0
    listed = {line.split()[0]: line for line in ran.out.splitlines() if line.startswith("  ")}
    for command in COMMANDS:
        assert len(listed[command].split()) >= 4, command


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_every_option_says_what_it_does(command: str) -> None:
    ran = specplan(command, "-h")
    assert ran.code == 0
    assert ran.out.startswith(f"Usage: specplan {command} [OPTIONS]")
    found = main.commands[command]
    assert found.help
    options = [each for each in found.params if isinstance(each, click.Option)]
    assert options
    for option in options:
        assert option.help, option.name


def test_version() -> None:
    ran = specplan("--version")
    assert (ran.code, ran.out) == (0, f"specplan, version {VERSION}\n")


@pytest.mark.parametrize("command", ["build", "coverage"])
def test_an_unknown_arch_or_family_is_a_usage_error_with_the_nearest(command: str) -> None:
    ran = specplan(command, "--arch", "sm_900a")
    assert ran.code == 2
    assert "unknown arch 'sm_900a'; did you mean 'sm_90a'?" in ran.err
    ran = specplan(command, "--arch", "volta")
    assert "unknown arch 'volta'; known: sm_90a, sm_100a, sm_103a, sm_107a" in ran.err
    ran = specplan(command, "--arch", "sm_90a", "--family", "scattter")
    assert ran.code == 2
    assert "unknown family 'scattter'; did you mean 'scatter'?" in ran.err


def test_exit_codes_of_a_process(place: Place) -> None:
    def run(*arguments: str | Path) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "specplan.tools.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout

    assert run("coverage", *place.options) == (0, specplan("coverage", *place.options).out)
    place.object("sm_90a", "gather").unlink()
    assert run("verify", "--packs", place.packs)[0] == 1
    assert run("coverage", "--nonsense") == (2, "")
