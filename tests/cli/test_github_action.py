"""The composite action, as far as a machine without GitHub can try it: its YAML is read strictly
and its shell steps run as a runner runs them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from support.synthetic import Place

ROOT = Path(__file__).resolve().parent.parent.parent
ACTION = ROOT / ".github" / "actions" / "coverage" / "action.yml"
WORKFLOW = ROOT / "examples" / "github-actions.yml"
EXPRESSION = re.compile(r"\$\{\{ *([a-z]+(?:\.[a-z_-]+)+) *\}\}")

DEPLOYMENT = """\
schema: 1
arch: {arch}
max_requests: {most}
draft_lengths: [0, 1]
families:
  scatter: {{history: 2, next: 2, draft: 1}}
"""


@dataclass(frozen=True)
class Job:
    """What the steps left."""

    failed: str | None
    outputs: dict[str, str]
    summary: str
    uploaded: list[str]
    log: str


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def run(directory: Path, given: dict[str, str], binaries: Path) -> Job:
    """The action's steps in order, as a runner does: values by expressions, files for outputs, bash
    with ``-eo pipefail``; a failed step skips the rest.
    """
    action = read(ACTION)
    inputs = {name: spec.get("default", "") for name, spec in action["inputs"].items()}
    assert not set(given) - set(inputs)
    inputs.update(given)
    values = {f"inputs.{name}": value for name, value in inputs.items()}
    summary, log = directory / "summary.md", ""
    summary.touch()
    failed, uploaded = None, []

    def fill(text: str) -> str:
        return EXPRESSION.sub(lambda match: values[match[1]], text)

    for number, step in enumerate(action["runs"]["steps"]):
        conditions = {
            None: True,
            "inputs.install != ''": bool(inputs["install"]),
            "inputs.artifact != '' && hashFiles(inputs.junit) != ''": bool(inputs["artifact"])
            and (directory / inputs["junit"]).is_file(),
        }
        if not conditions[step.get("if")]:
            continue
        if "uses" in step:
            assert step["uses"] == "actions/upload-artifact@v4"
            uploaded.append(fill(step["with"]["path"]))
            continue
        output = directory / f"output-{number}"
        output.touch()
        script = directory / f"step-{number}.sh"
        script.write_text(fill(step["run"]), encoding="utf-8")
        env = {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(summary),
            **{name: fill(value) for name, value in step.get("env", {}).items()},
        }
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=directory,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        log += done.stdout + done.stderr
        for line in output.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition("=")
            values[f"steps.{step['id']}.outputs.{name}"] = value
        if done.returncode:
            failed = step["name"]
            break
    outputs = {name: fill(spec["value"]) for name, spec in action["outputs"].items()}
    return Job(failed, outputs, summary.read_text(encoding="utf-8"), uploaded, log)


@pytest.fixture
def binaries(tmp_path: Path, place: Place) -> Path:
    """``specplan`` and ``python`` as the action finds them; the catalog is the synthetic one."""
    directory = tmp_path / "bin"
    directory.mkdir()
    command = directory / "specplan"
    catalog = f"--catalog {place.catalog_path} --certificates {place.certificates}"
    module = f"{sys.executable} -m specplan.tools.cli"
    command.write_text(f'#!/bin/sh\ncommand=$1; shift\nexec {module} $command {catalog} "$@"\n')
    command.chmod(0o755)
    python = directory / "python"
    python.write_text('#!/bin/sh\necho "python $*"\n')
    python.chmod(0o755)
    return directory


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    directory = tmp_path / "work space"
    directory.mkdir()
    return directory


def server(workspace: Path, arch: str = "sm_90a", most: int = 4) -> str:
    text = DEPLOYMENT.format(arch=arch, most=most)
    (workspace / "my server.yaml").write_text(text, encoding="utf-8")
    return "my server.yaml"


def test_a_covered_server_passes_and_its_file_is_uploaded(
    place: Place, workspace: Path, binaries: Path
) -> None:
    given = {"deployment": server(workspace), "packs": str(place.packs)}
    job = run(workspace, given, binaries)
    assert job.failed is None, job.log
    assert job.outputs == {"covered": "true", "junit": "specplan-junit.xml"}
    assert job.uploaded == ["specplan-junit.xml"]
    suite = ElementTree.parse(workspace / "specplan-junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("8", "0")
    assert "Every reachable cell is certified and built." in job.summary


@pytest.mark.parametrize(("arch", "most"), [("sm_90a", 5), ("sm_120a", 4)])
def test_a_server_with_holes_fails_at_the_end_after_its_file_is_uploaded(
    place: Place, workspace: Path, binaries: Path, arch: str, most: int
) -> None:
    given = {"deployment": server(workspace, arch, most), "packs": str(place.packs)}
    job = run(workspace, {**given, "junit": "out of place.xml"}, binaries)
    assert job.failed == "verdict"
    assert job.outputs["covered"] == "false"
    assert job.uploaded == ["out of place.xml"]
    failures = ElementTree.parse(workspace / "out of place.xml").findall("testcase/failure")
    assert len(failures) == (2 if most == 5 else 8)
    assert "| scatter | small | int32 |" in job.summary


def test_a_malformed_file_fails_with_its_place_and_uploads_nothing(
    place: Place, workspace: Path, binaries: Path
) -> None:
    path = server(workspace, arch="sm_90")
    job = run(workspace, {"deployment": path, "packs": str(place.packs)}, binaries)
    assert job.failed == "verdict"
    assert "my server.yaml:2:7: arch: unknown name 'sm_90'; did you mean 'sm_90a'?" in job.log
    assert (job.uploaded, job.summary) == ([], "")
    assert not (workspace / "specplan-junit.xml").exists()


def test_what_to_install_is_one_argument_and_no_shell_text(
    place: Place, workspace: Path, binaries: Path
) -> None:
    given = {"deployment": server(workspace), "packs": str(place.packs), "artifact": ""}
    job = run(workspace, {**given, "install": "a wheel.whl; echo no"}, binaries)
    assert job.failed is None, job.log
    said = "python -m pip install --quiet --disable-pip-version-check a wheel.whl; echo no\n"
    assert job.log == said
    assert job.uploaded == []


def test_every_expression_names_what_is_declared_and_no_shell_text_holds_one() -> None:
    """What people write into inputs reaches bash by its environment alone."""
    action = read(ACTION)
    assert action["runs"]["using"] == "composite"
    steps = action["runs"]["steps"]
    ids = {step["id"] for step in steps if "id" in step}
    for name in re.findall(r"inputs\.([a-z]+)", ACTION.read_text(encoding="utf-8")):
        assert name in action["inputs"], name
    for name in re.findall(r"steps\.([a-z]+)\.", ACTION.read_text(encoding="utf-8")):
        assert name in ids, name
    for step in steps:
        assert ("uses" in step) != ("run" in step)
        if "run" in step:
            assert step["shell"] == "bash"
            assert "${{" not in step["run"]
            used = set(re.findall(r"\$\{?([A-Z_]+)", step["run"]))
            runner = {"GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"}
            assert used - runner == set(step.get("env", {})), step["name"]
    for spec in action["inputs"].values():
        assert spec["description"] and ("default" in spec or spec["required"])


def test_the_example_workflow_uses_the_action_with_inputs_that_it_has() -> None:
    workflow = read(WORKFLOW)
    # YAML 1.1 reads the key `on` as true.
    assert set(workflow) == {"name", True, "permissions", "jobs"}
    (job,) = workflow["jobs"].values()
    uses = [step for step in job["steps"] if "uses" in step]
    mine = [step for step in uses if "specplan" in step["uses"] or step["uses"].startswith("./")]
    assert [(ROOT / step["uses"] / "action.yml").resolve() for step in mine] == [ACTION]
    inputs = read(ACTION)["inputs"]
    assert not set(mine[0]["with"]) - set(inputs)
    assert {name for name, spec in inputs.items() if spec.get("required")} <= set(mine[0]["with"])


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    for number, step in enumerate(read(ACTION)["runs"]["steps"]):
        if "run" in step:
            script = tmp_path / f"{number}.sh"
            script.write_text(f"#!/bin/bash\n{step['run']}", encoding="utf-8")
            assert subprocess.run(["shellcheck", str(script)], check=False).returncode == 0
