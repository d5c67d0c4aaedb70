"""A broken or crowded world at run time: forked children, GPUs of several archs, threads, no
home.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from specplan.plans import locations, manifest

from support import packs

torch = pytest.importorskip("torch")

import specplan  # noqa: E402
from specplan import Reason, Uncertified, forked  # noqa: E402
from specplan import op as op_module  # noqa: E402

from support.stubs import Compiled, OnDevice  # noqa: E402  isort: skip
from test_runtime_calls import SCATTER  # noqa: E402  isort: skip


#: Where scatter's compiled function takes its number of rows.
ROWS = SCATTER.index("rows")


def scatter_call(requests: int, width: int, kind: type[OnDevice] = OnDevice) -> tuple[Any, ...]:
    """A scatter of mtp3's stores."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32).as_subclass(kind)

    outputs = (zeros(requests, width), zeros(requests, 4), zeros(requests), zeros(requests, 3))
    stores = (zeros(4, 8, 1), zeros(4, 8, 1), zeros(8), zeros(8, 3))
    return (*outputs, zeros(requests), *stores, 0, requests)


# Forked children


def in_child(work: Callable[[], Any]) -> Any:
    """What a forked child returns, as JSON; its exception as [class, reason, text]."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                answer = work()
            except specplan.SpecplanError as error:
                answer = [type(error).__name__, error.reason, str(error)]
            except BaseException:
                answer = traceback.format_exc()
            os.write(writing, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(text)


@pytest.fixture
def used(pack: specplan.Pack, monkeypatch: pytest.MonkeyPatch) -> specplan.Pack:
    """A pack that has launched in this process."""
    pack.prepare()
    return pack


def test_a_forked_child_gets_one_clear_error_from_everything_that_would_touch_cuda(
    used: specplan.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Converter:
        @staticmethod
        def from_dlpack(tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    monkeypatch.setattr(op_module.library, "tvm_ffi", Converter)
    call = scatter_call(2, 3)
    assert used.scatter(*call) is True
    launch = used.scatter.bind(*call)
    launch()
    functions = used._packs[packs.ARCH].functions
    before = sum(len(stub.launches) for stub in functions.values())
    uses: dict[str, Callable[[], Any]] = {
        "call": lambda: used.scatter(*call),
        "require": lambda: used.scatter.require(*call),
        "bind": lambda: bool(used.scatter.bind(*call)),
        "bound launch": launch,
        "prepare": used.prepare,
        "gather": lambda: used.gather(),
        "an op of several": lambda: used.rollback.gather(),
        "gdn": lambda: used.gdn_replay.verify(),
        "attention": lambda: used.sparse_gqa_verify(),
    }
    for name, work in uses.items():
        answer = in_child(work)
        assert answer[:2] == ["ForkedError", "forked"], (name, answer)
        assert "CUDA does not survive a fork" in answer[2]
        assert "'spawn'" in answer[2]
    # The parent goes on.
    assert used.scatter(*call) is True
    launch()
    assert sum(len(stub.launches) for stub in functions.values()) == before + 2


def test_a_grandchild_is_told_the_same(used: specplan.Pack) -> None:
    answer = in_child(lambda: in_child(lambda: used.scatter(*scatter_call(2, 3))))
    assert answer[0] == "ForkedError"


def test_what_needs_no_gpu_works_in_the_child(used: specplan.Pack) -> None:
    def picks() -> Any:
        picked = used.scatter.pick(requests=2, tokens=3, problem="mtp3")
        return [picked.plan.symbol, repr(used), used.archs]

    assert in_child(picks) == json.loads(json.dumps(picks()))


def test_a_child_of_a_process_that_has_not_used_cuda_may_use_the_pack(
    pack: specplan.Pack,
) -> None:
    assert in_child(lambda: pack.scatter(*scatter_call(2, 3))) is True


def test_loading_where_cuda_cannot_be_used_is_the_same_error(
    small_pack: packs.SmallPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(specplan.ForkedError):
        specplan.load(small_pack.root)
    # Named by its arch, it can be looked at.
    loaded = specplan.load(small_pack.root, arch=packs.ARCH)
    assert loaded.scatter.pick(requests=1, tokens=1, problem="mtp3")
    with pytest.raises(specplan.ForkedError):
        loaded.scatter(*scatter_call(1, 1))


def test_the_hook_costs_a_call_nothing(used: specplan.Pack) -> None:
    """The ops of the process that loaded them are the functions made from their declarations:
    nothing stands between a call and them.
    """
    assert used.scatter.__code__.co_name == "scatter"
    assert used.scatter.__code__.co_filename == "<specplan scatter.scatter>"
    assert "prepare" not in vars(used)
    assert forked.inherited() is False


def test_packs_that_are_gone_are_not_kept(small_pack: packs.SmallPack) -> None:
    loaded = specplan.load(small_pack.root, arch=packs.ARCH)
    assert loaded in forked._PACKS
    held = len(forked._PACKS)
    del loaded
    import gc

    gc.collect()
    assert len(forked._PACKS) < held


# GPUs of different archs


class OnSecond(OnDevice):
    """A CPU tensor that claims to be on ``cuda:1``."""

    def get_device(self) -> int:
        return 1


class OnThird(OnDevice):
    def get_device(self) -> int:
        return 2


@pytest.fixture
def mixed(
    small_pack: packs.SmallPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> specplan.Pack:
    """A machine with three GPUs: of sm_90a, of sm_100a (where all is candidate) and of an arch
    without a pack.
    """
    root = tmp_path / "packs"
    shutil.copytree(small_pack.directory, root / "sm_90a")
    shutil.copytree(small_pack.directory, root / "sm_100a")
    old = small_pack.manifest
    groups = tuple(dataclasses.replace(group, certified=False) for group in old.groups)
    packs.rewrite(root / "sm_100a", arch="sm_100a", capability=(10, 0), groups=groups)
    there = [(9, 0), (10, 0), (8, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: there[i])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    loaded = specplan.load(root, candidates=True)
    for pack in loaded._packs.values():
        plans = pack.manifest.plans.items()
        pack.functions = {symbol: Compiled(symbol, dict(plan.spec)) for symbol, plan in plans}
    for op in (type(loaded.scatter.op), type(loaded.gather.op)):
        real = op.idle_arguments.__func__
        on_host = functools.partial(_idle_on_host, real)
        monkeypatch.setattr(op, "idle_arguments", classmethod(on_host))
    return loaded


def _idle_on_host(real: Any, cls: Any, plan: Any, device: Any) -> Any:
    return real(cls, plan, torch.device("cpu"))


def launches(pack: specplan.Pack, arch: str) -> int:
    """Launches of work by one arch's functions."""
    stubs = pack._packs[arch].functions.values()
    return sum(a[ROWS] > 0 for stub in stubs for a in stub.launches if "scatter" in stub.symbol)


def test_each_of_two_gpus_runs_the_pack_of_its_own_arch(mixed: specplan.Pack) -> None:
    assert mixed.archs == ("sm_90a", "sm_100a")
    first, second = scatter_call(2, 3), scatter_call(2, 3, OnSecond)
    # The same call on one device and on the other, in turns: neither remembers the other's plan.
    for turn in range(1, 4):
        assert mixed.scatter(*first) is True
        assert mixed.scatter(*second) is True
        assert (launches(mixed, "sm_90a"), launches(mixed, "sm_100a")) == (turn, turn)
    picked = [mixed.scatter.pick(requests=2, tokens=3, problem="mtp3", arch=a) for a in mixed.archs]
    assert [(p.cell.arch, p.certified) for p in picked] == [("sm_90a", True), ("sm_100a", False)]
    assert picked[0].function is not picked[1].function


def test_a_gpu_without_a_pack_is_declined_beside_ones_that_have_one(mixed: specplan.Pack) -> None:
    answer = mixed.scatter(*scatter_call(2, 3, OnThird))
    assert isinstance(answer, Uncertified)
    assert answer.reason is Reason.DEVICE
    assert "cuda:2, the loaded packs are for sm_90a, sm_100a" in str(answer)
    with pytest.raises(specplan.NoDeviceError, match="sm_90a, sm_100a"):
        mixed.prepare(2)


def test_candidates_of_one_arch_are_declined_while_the_other_runs(mixed: specplan.Pack) -> None:
    mixed.candidates = False
    assert mixed.scatter(*scatter_call(2, 3)) is True
    answer = mixed.scatter(*scatter_call(2, 3, OnSecond))
    assert isinstance(answer, Uncertified)
    assert (answer.reason, answer.arch) == (Reason.CANDIDATE, "sm_100a")


def test_prepare_loads_each_arch_on_its_own_device(mixed: specplan.Pack) -> None:
    mixed.prepare()
    assert mixed._prepared == {(i, f) for i in (0, 1) for f in specplan.pack.FAMILIES}
    for arch in mixed.archs:
        stubs = mixed._packs[arch].functions.values()
        assert {len(stub.launches) for stub in stubs} == {1}


# Threads


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads change places as often as the interpreter can."""
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(old)


def test_calls_from_many_threads_each_get_their_own_plan(
    pack: specplan.Pack, hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads make calls of random sizes over few remembered ones, so that looking up,
    remembering and forgetting meet.
    """
    monkeypatch.setattr(op_module, "MOST_REMEMBERED", 3)
    wrong: list[Any] = []
    ready = threading.Barrier(8)

    def serve(seed: int) -> None:
        chance = random.Random(seed)
        calls = [(r, w, scatter_call(r, w)) for r in (1, 2, 3, 4) for w in (1, 2, 3, 4)]
        ready.wait()
        for _ in range(400):
            requests, width, call = chance.choice(calls)
            answer = pack.scatter(*call)
            if answer is not True:
                wrong.append((requests, width, answer))

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    work = [
        (stub.spec, arguments)
        for stub in pack._packs[packs.ARCH].functions.values()
        for arguments in stub.launches
        if stub.symbol.startswith("scatter") and arguments[ROWS] > 0
    ]
    assert len(work) == 8 * 400
    for spec, arguments in work:
        assert (spec["history"], spec["next"], spec["draft"]) == (4, 4, 3)
        assert arguments[0].shape[0] == arguments[ROWS] == arguments[4].numel()


def test_a_first_call_from_many_threads_loads_the_code_once(
    pack: specplan.Pack, hurried: None
) -> None:
    ready = threading.Barrier(8)
    answers: list[Any] = []

    def serve() -> None:
        call = scatter_call(2, 3)
        ready.wait()
        answers.append(pack.scatter(*call))

    threads = [threading.Thread(target=serve) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 8
    stubs = pack._packs[packs.ARCH].functions.values()
    idle = [sum(a[ROWS] == 0 for a in s.launches) for s in stubs if s.symbol.startswith("scatter")]
    assert set(idle) == {1}


# No home, nothing writable

NOBODY = 54_321

#: Imports what it needs (which this user may not be able to read afterwards), then becomes a user
#: without a name, a home, or anything that it may write.
BECOME = f"""
import json, os, sys, io, contextlib, pwd
import torch, click, yaml, specplan, specplan.pack, specplan.tools.cli, specplan.tools.build
import specplan.tools.inventory, specplan.plans.device_code, specplan.tools.build.keys
specplan.library.tvm_ffi()
# As installed: the tests run from a checkout, whose own packs are not meant here.
specplan.plans.locations.checkout_directory = lambda: None
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
os.environ.pop("HOME", None)
os.environ.pop("XDG_DATA_HOME", None)
"""

LOADS = """
try:
    open(os.path.join(sys.argv[1], "sm_90a", "probe"), "w")
    wrote = True
except PermissionError:
    wrote = False
try:
    pack = specplan.load(arch="sm_90a")
    picked = pack.scatter.pick(requests=2, tokens=3, problem="mtp3")
    print(json.dumps([os.getuid(), wrote, picked.plan.symbol]))
except specplan.SpecplanError as error:
    print(json.dumps([type(error).__name__, wrote, str(error)]))
"""

COMMANDS = """
answers = {}
for arguments in ("build --arch sm_90a", "list", "size", "verify", "gc", "coverage"):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            specplan.tools.cli.main(args=arguments.split(), prog_name="specplan")
            code = 0
        except SystemExit as exit_:
            code = exit_.code
    answers[arguments.split()[0]] = [code, err.getvalue()]
print(json.dumps(answers))
"""


@pytest.fixture
def readable(small_pack: packs.SmallPack) -> Iterator[Path]:
    """A copy of the pack that everybody may read and nobody may write."""
    if os.getuid() != 0:
        pytest.skip("only root can become a user without a home")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "packs"
        shutil.copytree(small_pack.directory, root / packs.ARCH)
        for path in (Path(directory), root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield root


def as_nobody(script: str, *arguments: str | Path, **env: str) -> Any:
    """What a script prints as JSON, run by a user who has no name, no home and may write
    nowhere.
    """
    done = packs.run([sys.executable, "-c", BECOME + script, *map(str, arguments)], env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_user_without_a_home_loads_a_read_only_install(readable: Path) -> None:
    before = packs.contents(readable)
    uid, wrote, symbol = as_nobody(LOADS, readable, SPECPLAN_PACKS=str(readable))
    assert (uid, wrote) == (NOBODY, False)
    assert symbol.startswith("scatter__history4")
    assert packs.contents(readable) == before


def test_without_a_home_the_search_leaves_it_out_and_a_build_asks_for_a_place(
    readable: Path,
) -> None:
    kind, _, text = as_nobody(LOADS, readable, SPECPLAN_PACKS="")
    assert kind == "PackNotFoundError"
    assert "the installed wheel" in text
    assert "per-user" not in text
    answers = as_nobody(COMMANDS, SPECPLAN_PACKS="")
    assert answers["build"] == [
        1,
        "error: this user has no home directory to keep packs in; "
        "name a directory with --out or $SPECPLAN_PACKS\n",
    ]
    for command in ("list", "size", "verify", "coverage"):
        code, err = answers[command]
        assert (code, err.startswith("error: no pack")) == (1, True), (command, err)


def test_a_home_that_cannot_be_found_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv(locations.ENVIRONMENT, raising=False)
    monkeypatch.setattr(locations, "checkout_directory", lambda: None)
    assert locations.build_directory() is None
    assert [why for why, _ in locations.search_path()] == ["the installed wheel"]
    assert manifest.packs_under(locations.packaged_directory()) is not None


# A pack that changes under a server


def test_a_pack_swapped_whole_by_rename_leaves_the_open_one_working(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    """What an installer does: the new directory is made beside and moved into place."""
    root = tmp_path / "packs"
    root.mkdir()
    current, new = root / packs.ARCH, tmp_path / "new"
    shutil.copytree(small_pack.directory, current)
    shutil.copytree(small_pack.directory, new)
    pack = specplan.load(root, arch=packs.ARCH)
    function = pack.scatter.pick(requests=1, tokens=1, problem="mtp3").function
    groups = tuple(g for g in small_pack.manifest.groups if g.family == "gather")
    packs.rewrite(new, version="9.9.9", groups=groups)
    current.rename(tmp_path / "old")
    new.rename(current)
    shutil.rmtree(tmp_path / "old")
    # The open pack's code is still mapped: it checks its arguments.
    with pytest.raises(TypeError, match="scatter"):
        function()
    assert pack.scatter.pick(requests=2, tokens=2, problem="mtp3")
    fresh = specplan.load(root, arch=packs.ARCH)
    assert fresh.manifest().version == "9.9.9"
    assert not fresh.scatter.pick(requests=2, tokens=2, problem="mtp3")
    assert fresh.gather.pick(requests=2, tokens=2, problem="mtp3")
    assert pack.scatter.pick(requests=2, tokens=2, problem="mtp3")
