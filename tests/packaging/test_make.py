"""The Makefile's and the hooks' set-up, with programs that only write down how they were called."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from support.packaging_runs import ROOT


class Recorded:
    """A virtual environment of stand-ins, and the commands that make ran in it."""

    def __init__(self, place: Path) -> None:
        # What a run of make around this one set, and what the Makefile would take from outside.
        options = re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
        self.taken = {*options, "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"}
        self.venv = place / "venv"
        self.log = place / "log"
        (self.venv / "bin").mkdir(parents=True)
        for name in ("python", "pip", "specplan", "ruff", "pre-commit"):
            program = self.venv / "bin" / name
            program.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.log}\n')
            program.chmod(0o755)

    def make(self, *arguments: str) -> list[str]:
        self.log.write_text("")
        subprocess.run(
            ["make", "--silent", f"VENV={self.venv}", *arguments],
            cwd=ROOT,
            check=True,
            capture_output=True,
            env={name: value for name, value in os.environ.items() if name not in self.taken},
        )
        return self.log.read_text().splitlines()


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def installed(commands: list[str]) -> list[str]:
    return [line.split()[-1] for line in commands if line.startswith("pip install")]


def test_every_run_of_make_test_honours_its_torch(recorded: Recorded) -> None:
    assert installed(recorded.make("test", "TORCH=torch==2.13.0"))[-2:] == [
        "torch==2.13.0",
        ".[test]",
    ]
    assert installed(recorded.make("test", "TORCH=torch==2.13.0")) == []
    assert installed(recorded.make("test", "TORCH=torch==2.14.1")) == ["torch==2.14.1"]
    # And back again: what counts is the last one, not whether it was ever installed.
    assert installed(recorded.make("test", "TORCH=torch==2.13.0")) == ["torch==2.13.0"]
    assert installed(recorded.make("test")) == ["torch>=2.9"]


def test_a_torch_that_did_not_install_is_not_taken_for_installed(recorded: Recorded) -> None:
    pip = recorded.venv / "bin" / "pip"
    works = pip.read_text()
    pip.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(subprocess.CalledProcessError):
        recorded.make("test", "TORCH=torch==2.13.0")
    pip.write_text(works)
    assert "torch==2.13.0" in installed(recorded.make("test", "TORCH=torch==2.13.0"))


def test_the_hooks_need_no_activated_environment() -> None:
    """A hook runs in an environment of its own, with the linter's version of the dev extra, or by
    make, which sets up what it needs.
    """
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dev = project["optional-dependencies"]["dev"]
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["id"] for hook in hooks} == {"ruff-format", "ruff-check", "types"}
    for hook in hooks:
        program = hook["entry"].split()[0]
        if hook["language"] == "python":
            (pin,) = hook["additional_dependencies"]
            assert re.match(rf"{program}==", pin) and pin in dev
        else:
            assert (hook["language"], program) == ("system", "make")


def test_make_hooks_installs_them(recorded: Recorded) -> None:
    assert recorded.make("hooks")[-1] == "pre-commit install"


def test_docs_name_no_index_that_does_not_have_specplan() -> None:
    """`pip install specplan` would find nothing, or somebody else's package; with an extra it adds
    to an installed specplan, which docs/install.md says once.
    """
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert len(pages) > 5
    found = [
        f"{page.name}: {match[0]}"
        for page in pages
        for match in re.finditer(r"pip install (?:-\S+ )*['\"]?specplan\b\S*", page.read_text())
        if page.name != "install.md" or "[" not in match[0]
    ]
    assert found == []


def test_pytest_leaves_out_no_directory_of_tests(request: pytest.FixtureRequest) -> None:
    """Its defaults leave out directories called ``build`` and ``dist``, without a word."""
    left_out = request.config.getini("norecursedirs")
    directories = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert ROOT / "tests" / "build" in directories
    for directory in directories:
        for part in directory.relative_to(ROOT).parts:
            assert not any(fnmatch(part, pattern) for pattern in left_out), directory
