"""A crowded world on a GPU: cold captures, forked children, threads on streams, a pack that is
swapped under a running server.

Run where a pack is: ``SPECPLAN_PACKS=packs pytest tests/device``. Skipped without a GPU of a
catalogued arch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import specplan
import torch
from specplan.kernels.gather.cases import checks as gather_checks
from specplan.kernels.scatter.cases import checks as scatter_checks
from specplan.plans import manifest

GEOMETRY = {"history": 8, "next": 8, "draft": 7}
CHECKS = {"scatter": scatter_checks, "gather": gather_checks}


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", 0)


def case_of(family: str, requests: int, tokens: int, device: torch.device) -> Any:
    keys = ("history", "next", "draft") if family == "scatter" else ("next", "draft")
    geometry = {key: GEOMETRY[key] for key in keys}
    return next(iter(CHECKS[family](geometry, requests, tokens, 1, "int32", device)))


def judge(case: Any, launch: Callable[[], Any], seed: int) -> None:
    case.refill(seed)
    expected = case.expect()
    launch()
    for comparison in case.compare(expected):
        assert float(comparison.error) <= comparison.bound, comparison


@pytest.mark.gpu
def test_a_cold_call_in_a_capture_is_one_error_and_costs_nothing_but_the_capture(
    device: torch.device,
) -> None:
    pack = specplan.load(candidates=True)
    case = case_of("scatter", 8, 4, device)
    case.refill(1)
    with pytest.raises(specplan.ColdCaptureError, match=r"pack\.prepare"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pack.scatter(**case.arguments())
    pack.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack.scatter.require(**case.arguments())
    judge(case, graph.replay, 2)
    judge(case, lambda: pack.scatter.require(**case.arguments()), 3)


FORKS = """
import json, os, sys
import torch, specplan
from specplan.kernels.scatter.cases import checks
device = torch.device("cuda", 0)
geometry = {"history": 8, "next": 8, "draft": 7}
case = next(iter(checks(geometry, 4, 4, 1, "int32", device)))
pack = specplan.load(candidates=True)
case.refill(1)
pack.scatter.require(**case.arguments())
bound = pack.scatter.bind(**case.arguments())
torch.cuda.synchronize()
answers = {}
uses = {
    "call": lambda: pack.scatter(**case.arguments()),
    "bound": bound,
    "prepare": pack.prepare,
    "load": lambda: specplan.load(candidates=True),
}
for name, use in uses.items():
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            use()
            text = "no error"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    answers[name] = os.fdopen(reading).read()
    os.wait()
expected = case.expect()
bound()
answers["parent"] = [float(c.error) for c in case.compare(expected)]
print(json.dumps(answers))
"""


@pytest.mark.gpu
def test_a_forked_child_gets_one_clear_error_and_the_parent_goes_on(device: torch.device) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert set(answers.pop("parent")) == {0.0}
    for name, text in answers.items():
        assert text.startswith("ForkedError: "), (name, text)
        assert "spawn" in text


@pytest.mark.gpu
def test_threads_on_streams_of_their_own_each_get_their_own_results(device: torch.device) -> None:
    """Eight threads, each with a stream and buffers, make first calls and many more at once."""
    pack = specplan.load(candidates=True)
    wrong: list[Any] = []
    ready = threading.Barrier(8)

    def serve(number: int) -> None:
        try:
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                cases = [
                    case_of(family, 1 + number + 8 * turn, 1 + (number + turn) % 8, device)
                    for family in CHECKS
                    for turn in range(3)
                ]
                ready.wait()
                for seed in range(100):
                    for case in cases:
                        case.refill(seed)
                        expected = case.expect()
                        op = getattr(pack, case.op)
                        launch = op.bind(**case.arguments())
                        launch() if seed % 2 else op.require(**case.arguments())
                        for comparison in case.compare(expected):
                            if float(comparison.error) > comparison.bound:
                                wrong.append((number, seed, comparison))
        except BaseException as error:
            wrong.append((number, repr(error)))

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]


@pytest.mark.gpu
def test_a_pack_swapped_under_a_running_server_works_on(
    device: torch.device, tmp_path: Path
) -> None:
    where = os.environ.get("SPECPLAN_PACKS")
    if where is None:
        pytest.skip("SPECPLAN_PACKS names the packs to copy")
    arch = specplan.load(where, candidates=True).archs[0]
    root = tmp_path / "packs"
    shutil.copytree(manifest.packs_under(Path(where))[arch], root / arch)
    pack = specplan.load(root, candidates=True)
    case = case_of("scatter", 8, 4, device)
    case.refill(1)
    bound = pack.scatter.bind(**case.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound()
    # Another pack takes the place of this one, and the old files are gone.
    new = tmp_path / "new"
    shutil.copytree(root / arch, new)
    old = manifest.read(new)
    groups = tuple(group for group in old.groups if group.family != "scatter")
    (new / manifest.NAME).write_text(
        manifest.dumps(dataclasses.replace(old, groups=groups)), encoding="utf-8"
    )
    (root / arch).rename(tmp_path / "old")
    new.rename(root / arch)
    shutil.rmtree(tmp_path / "old")
    judge(case, graph.replay, 2)
    judge(case, bound, 3)
    # Plans that this server has not used so far, too.
    for requests, tokens in ((1, 1), (64, 7), (256, 8)):
        other = case_of("gather", requests, tokens, device)
        judge(other, lambda other=other: pack.gather.require(**other.arguments()), 4)
    fresh = specplan.load(root, candidates=True)
    assert not fresh.scatter.pick(requests=8, tokens=4, **GEOMETRY)
    assert pack.scatter.pick(requests=8, tokens=4, **GEOMETRY)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["scatter", "gather"])
def test_a_call_runs_where_its_tensors_are_whatever_the_current_device(
    device: torch.device, family: str
) -> None:
    """Tensors on ``cuda:1`` while ``cuda:0`` is current: called, bound, and then captured with the
    tensors' device made current and on a stream of it: torch's default stream for captures is of
    the device that captured first.
    """
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    pack = specplan.load(candidates=True)
    pack.prepare()
    op = getattr(pack, family)
    case = case_of(family, 8, 4, other)
    assert torch.cuda.current_device() == 0
    judge(case, lambda: op.require(**case.arguments()), 1)
    case.refill(2)
    launch = op.bind(**case.arguments())
    judge(case, launch, 2)
    assert torch.cuda.current_device() == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(other):
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(other)):
            launch()
        judge(case, graph.replay, 3)
