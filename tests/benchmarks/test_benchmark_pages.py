"""``python -m benchmarks``: pages are of the committed results, comparisons are by ratio."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_committed_pages_are_of_the_committed_results() -> None:
    done = ran("report", "--check")
    assert done.returncode == 0, done.stderr


def test_pages_of_other_results_are_named(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    body = json.loads((tmp_path / "rollback.json").read_text())
    body["rows"][0]["graph_gather_us"] += 1.0
    (tmp_path / "rollback.json").write_text(json.dumps(body))
    done = ran("report", "--check", "--results", tmp_path)
    assert done.returncode == 1
    assert "README.md is not what the results give" in done.stderr
    assert "step-dark.svg is of other data" in done.stderr


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Old and new result files with the same rows, and the new body to change."""
    body = json.loads((RESULTS / "whole_step.json").read_text())
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(body))
    return old, new, copy.deepcopy(body)


def scaled(row: dict[str, Any], factor: float, names: tuple[str, ...]) -> None:
    for name in names:
        row[name] *= factor


PEERS = ("triton_replay_us", "state_a_token_us")


def test_a_slower_machine_is_no_slow_down(files: tuple[Path, Path, dict[str, Any]]) -> None:
    old, new, body = files
    for row in body["rows"]:
        scaled(row, 1.7, ("ours_us", *PEERS))
    new.write_text(json.dumps(body))
    done = ran("compare", old, new)
    assert done.returncode == 0, done.stdout
    assert f"{len(body['rows'])} points, 0 more than 5 % worse" in done.stdout


@pytest.mark.parametrize(("factor", "code"), [(1.06, 1), (1.04, 0), (0.5, 0)])
def test_a_point_beside_its_peer_decides(
    files: tuple[Path, Path, dict[str, Any]], factor: float, code: int
) -> None:
    old, new, body = files
    scaled(body["rows"][-1], factor, ("ours_us",))
    new.write_text(json.dumps(body))
    done = ran("compare", old, new)
    assert done.returncode == code, done.stdout
    assert ("WORSE" in done.stdout) == (code == 1)


def test_the_strongest_peer_of_the_old_run_is_the_measure(
    files: tuple[Path, Path, dict[str, Any]],
) -> None:
    old, new, body = files
    scaled(body["rows"][0], 0.5, ("state_a_token_us",))  # a weaker peer that got faster
    new.write_text(json.dumps(body))
    done = ran("compare", old, new)
    assert done.returncode == 0, done.stdout
    assert "state_a_token_us" not in done.stdout


@pytest.mark.parametrize("what", ["another benchmark", "no common point", "no results"])
def test_files_that_cannot_be_compared_are_a_usage_error(
    files: tuple[Path, Path, dict[str, Any]], what: str
) -> None:
    old, new, body = files
    if what == "another benchmark":
        new.write_text((RESULTS / "rollback.json").read_text())
    elif what == "no common point":
        for row in body["rows"]:
            row["requests"] += 1000
        new.write_text(json.dumps(body))
    else:
        new.write_text("{}")
    done = ran("compare", old, new)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def _bookkeeping(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    where = {"device": "NVIDIA H200", "driver": "1.2", "date": "2026-12-02"}
    return {"benchmark": name, **where, "rows": rows}


def test_the_bookkeeping_s_results_are_drawn_and_compared(tmp_path: Path) -> None:
    arms = ("ours", "torch", "compiled", "triton")
    times = {
        f"{how}_{arm}_us": at + 2.0 for how in ("graph", "eager") for at, arm in enumerate(arms)
    }
    times |= {"host_op_us": 5.0, "host_bare_us": 4.5}
    accept = {"dtype": "bf16", "columns": 151936, "requests": 64, "tokens": 4, **times}
    setup = [{"family": "step_setup", "size": "64 x 4", **times},
             {"family": "stage", "size": "2048 bytes", **times}]  # fmt: skip
    between = {"requests": 8, "tokens": 4, **times, "torch_launches": 150, "torch_nodes": 151,
               "ours_launches": 9, "ours_nodes": 10}  # fmt: skip
    for name, rows in (("accept", [accept]), ("step_setup", setup), ("between_steps", [between])):
        (tmp_path / f"{name}.json").write_text(json.dumps(_bookkeeping(name, rows)))
    done = ran("report", "--results", tmp_path, "--out", tmp_path / "pages")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "pages" / "README.md").read_text()
    assert "8 requests: 150 launches and 151 nodes of torch, 9 and 10 of ours." in page
    assert "| BF16, 151,936, 64, 4 | 2 | 5 (2.50x) | 4 (2.00x) | 3 (1.50x) |" in page
    assert "stage, 2048 bytes" in page and "torch.compile" in page and "Triton, plain" in page
    slow = {**accept, "graph_ours_us": 2.5}
    (tmp_path / "new.json").write_text(json.dumps(_bookkeeping("accept", [slow])))
    done = ran("compare", tmp_path / "accept.json", tmp_path / "new.json")
    assert done.returncode == 1 and "2 points, 1 more than 5 % worse" in done.stdout, done.stdout
