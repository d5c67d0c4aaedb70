"""``specplan simulate``, on the small pack: what it runs, writes and refuses, and the mark that
coverage shows.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from support import packs

pytest.importorskip("torch")
pytest.importorskip("numpy")

from specplan.plans import manifest, simulations
from specplan.plans.manifest import Use
from specplan.plans.simulations import SimulationFileError
from specplan.tools.simulate import tasks

from support.shared import Shared


@pytest.fixture(scope="module")
def simulated(small_pack: packs.SmallPack, shared: Shared) -> Path:
    """A copy of the small pack, simulated, with the results beside it."""

    def simulate(place: Path) -> None:
        root = small_pack.copy(place / "packs")
        done = packs.run(packs.command("simulate", root))
        (place / "said").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr

    return shared.made("simulated-pack", simulate) / "packs"


def results(root: Path, family: str = "scatter") -> Path:
    return root / packs.ARCH / "simulations" / packs.ARCH / f"{family}.yaml"


def test_every_plan_of_a_pack_is_simulated(simulated: Path) -> None:
    pack = manifest.read(simulated / packs.ARCH)
    found = simulations.read_all([simulations.local_directory(simulated / packs.ARCH)], packs.ARCH)
    assert {symbol for each in found for symbol in each.plans} == set(pack.plans)
    for each in found:
        for symbol, ran in each.plans.items():
            assert ran.device_code == pack.plans[symbol].device_code
            assert ran.host_code == pack.plans[symbol].host_code
            assert ran.instructions > 1000 and ran.calls >= 2 and ran.comparisons >= ran.calls
            assert [m.error for m in ran.outputs] == [0.0]
            assert each.covers([Use(symbol)], pack)
        assert "not a certificate" in results(simulated, each.family).read_text().lower()
    said = (simulated.parent / "said").read_text()
    assert f"{len(pack.plans)} of {len(pack.plans)} plans simulated" in said


def test_other_bits_are_not_simulated(simulated: Path) -> None:
    pack = manifest.read(simulated / packs.ARCH)
    found = simulations.read(results(simulated))
    symbol = next(iter(found.plans))
    for what in ("device_code", "host_code"):
        changed = replace(pack.plans[symbol], **{what: "0" * 64})
        assert not found.covers([Use(symbol)], replace(pack, plans={symbol: changed}))
    assert not found.covers([Use(symbol), Use("another")], pack)


def test_coverage_marks_candidates_and_calls_nothing_certified(
    simulated: Path, small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    # An installation without simulations: the committed ones cover the small pack's bits, too.
    alone = packs.path_of(packs.tree(tmp_path / "sources"))

    def coverage(root: Path) -> tuple[dict[str, int], list[dict[str, object]], str]:
        where = ("--packs", root, "--catalog", small_pack.catalog, "--certificates", tmp_path)
        done = packs.run(packs.command("coverage", *where, "--json"), env=alone)
        cells = json.loads(done.stdout)["cells"]
        states: dict[str, int] = {}
        for cell in cells:
            states[str(cell["state"])] = states.get(str(cell["state"]), 0) + 1
        return states, cells, packs.run(packs.command("coverage", *where), env=alone).stdout

    with_mark, marked, table = coverage(simulated)
    plain_root = small_pack.copy(tmp_path / "plain")
    without, plain, plain_table = coverage(plain_root)
    assert with_mark == without, "no state depends on a simulation"
    assert all(cell["simulated"] is True for cell in marked)
    assert all(cell["simulated"] is False for cell in plain)
    head, *rows = (line.split("  ") for line in table.splitlines()[:3])
    assert head[-1].strip() == "simulated"
    candidates = [str(sum(c["state"] == "candidate" and c["family"] == f for c in marked))
                  for f in ("scatter", "gather")]  # fmt: skip
    assert [row[-1].strip() for row in rows] == candidates
    assert [line.split()[-1] for line in plain_table.splitlines()[1:3]] == [".", "."]


def test_an_edited_file_is_refused(
    simulated: Path, small_pack: packs.SmallPack, cli: packs.Cli, tmp_path: Path
) -> None:
    root = tmp_path / "packs"
    shutil.copytree(simulated, root)
    path = results(root)
    text = path.read_text()
    for edited in (
        text.replace("calls: ", "calls: 1", 1),
        text[: len(text) // 2],
        "",
        "digest: x\n",
    ):
        path.write_text(edited)
        with pytest.raises(SimulationFileError, match="does not match its own digest"):
            simulations.read(path)
    done = cli("coverage", "--packs", root, "--catalog", small_pack.catalog)
    assert done.returncode == 1 and "does not match its own digest" in done.stderr


def test_an_error_above_its_bound_cannot_be_written_down(simulated: Path) -> None:
    found = simulations.read(results(simulated))
    symbol, ran = next(iter(found.plans.items()))
    for change in (
        {"outputs": (replace(ran.outputs[0], error=1.0),)},
        {"outputs": ()},
        {"cells": ()},
        {"calls": 0},
    ):
        wrong = replace(found, plans={symbol: replace(ran, **change)})
        path = simulated.parent / "wrong.yaml"
        path.write_text(simulations.dumps(wrong))
        with pytest.raises(SimulationFileError, match="not a file of simulations"):
            simulations.read(path)


def test_results_of_a_sample_are_added(simulated: Path, cli: packs.Cli, tmp_path: Path) -> None:
    done = cli("simulate", simulated, "--sample", "2/3", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    names = sorted(tasks_of(simulated))[1::3]
    found = simulations.read_all([tmp_path], packs.ARCH)
    assert sorted(symbol for each in found for symbol in each.plans) == names
    done = cli("simulate", simulated, "--sample", "1/3", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    found = simulations.read_all([tmp_path], packs.ARCH)
    both = sorted([*names, *sorted(tasks_of(simulated))[0::3]])
    assert sorted(symbol for each in found for symbol in each.plans) == both


def tasks_of(root: Path) -> list[str]:
    directory = root / packs.ARCH
    return [task.symbol for task in tasks(directory, manifest.read(directory), [])]


def test_a_plan_that_these_sources_do_not_give_is_not_simulated(
    simulated: Path, cli: packs.Cli, tmp_path: Path
) -> None:
    """The PTX must be that of the machine code in the pack."""
    root = tmp_path / "packs"
    shutil.copytree(simulated, root)
    directory = root / packs.ARCH
    pack = manifest.read(directory)
    symbol = next(s for s in pack.plans if s.startswith("gather"))
    shutil.rmtree(root / "ptx", ignore_errors=True)
    other = replace(pack.plans[symbol], device_code="0" * 64)
    packs.rewrite(directory, plans={**pack.plans, symbol: other})
    done = cli("simulate", directory, "--family", "gather", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "give another device code than the pack has; build the pack again" in done.stderr
    found = simulations.read_all([tmp_path / "out"], packs.ARCH)
    assert symbol not in {s for each in found for s in each.plans}


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["--sample", "4/3"], "not N/M", 2),
        (["--sample", "x"], "not N/M", 2),
        (["--arch", "sm_90"], "did you mean", 2),
        (["--family", "scater"], "did you mean", 2),
        (["--jobs", "0"], "--jobs", 2),
    ],
)
def test_wrong_usage(
    simulated: Path, cli: packs.Cli, arguments: list[str], said: str, code: int
) -> None:
    done = cli("simulate", simulated, *arguments)
    assert done.returncode == code and said in done.stderr


def test_a_place_without_packs(cli: packs.Cli, tmp_path: Path) -> None:
    done = cli("simulate", tmp_path)
    assert done.returncode == 1 and "no pack under" in done.stderr
