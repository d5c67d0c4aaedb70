"""A plan's key: what changes it, and what must not."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from specplan import kernels
from specplan.plans.catalog import load as load_catalog
from specplan.plans.plan import Plan
from specplan.tools.build import keys, pipeline

from support import packs

PLAN = Plan(
    "scatter", "scatter", "sm_90a", (("history", 4), ("next", 4), ("draft", 3), ("lanes", 4))
)

#: Prints the keys of one plan of each family, as the tree on the path makes them.
PRINT = """
import json
from specplan.plans.catalog import load as load_catalog
from specplan.plans.plan import Plan
from specplan.tools.build import keys, pipeline
a = Plan("scatter", "scatter", "sm_90a", (("history", 4), ("next", 4), ("draft", 3), ("lanes", 4)))
b = Plan("gather", "gather", "sm_90a", (("next", 4), ("draft", 3), ("lanes", 4)))
print(json.dumps([keys.key(a), keys.key(b)]))
"""


def printed(directory: Path, **env: str) -> list[dict[str, object]]:
    done = packs.run(
        [sys.executable, "-c", PRINT], cwd=directory, env={**packs.path_of(directory), **env}
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packs.tree(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def before(sources: Path) -> list[dict[str, object]]:
    return printed(sources)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Forget what the key functions remember before and after a test that changes what they look
    at.
    """
    remembered = (keys.tool_versions, keys._spec, keys._imports, keys.sources)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


def test_sources_follow_imports_and_stop_at_this_package() -> None:
    found = set(keys.sources("scatter"))
    assert {
        "specplan.kernels.scatter.kernel",
        "specplan.kernels.fakes",
        "specplan.kernels.device.memory",
        "specplan.plans.plan",
    } <= found
    assert all(name.startswith("specplan.") for name in found)
    assert "specplan.kernels.scatter.reference" not in found
    assert "specplan.kernels.gather.kernel" not in found
    assert not any(name.startswith("specplan.tools") for name in found)


@pytest.mark.parametrize("family", ["gdn_replay", "sparse_gqa_verify"])
def test_every_module_of_device_code_is_a_source(family: str) -> None:
    """A stage that no plan's key held could change unseen."""
    folder = Path(kernels.__file__).parent / family
    names = {path.stem for path in folder.glob("*.py")}
    checks = {"__init__", "cases", "drawn", "reference", "writer"}
    wanted = {f"specplan.kernels.{family}.{name}" for name in names - checks}
    assert len(wanted) > 3 and wanted <= set(keys.sources(family))


def test_sources_follow_every_spelling_of_an_import(tmp_path: Path) -> None:
    package = packs.tree(tmp_path) / "specplan" / "kernels" / "made_up"
    (package / "inner").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "kernel.py": "import specplan.kernels.made_up.absolute as a\nfrom .inner import far\n"
        "def late():\n    from specplan.kernels.made_up import lazy\n",
        "absolute.py": "import json, no_such_package, specplan.no_such_module",
        "lazy.py": "from .absolute import anything",
        "inner/__init__.py": "from . import near",
        "inner/near.py": "from ...made_up import sideways",
        "inner/far.py": "",
        "sideways.py": "from .kernel import late",
        "unreached.py": "",
    }.items():
        (package / name).write_text(text)
    script = "from specplan.tools.build import keys; print(*keys.sources('made_up'))"
    done = packs.run([sys.executable, "-c", script], cwd=tmp_path, env=packs.path_of(tmp_path))
    assert done.returncode == 0, done.stderr
    here = "specplan.kernels.made_up"
    modules = ("kernel", "absolute", "inner", "inner.far", "inner.near", "lazy", "sideways")
    assert set(done.stdout.split()) == {here, *(f"{here}.{name}" for name in modules)}


@pytest.mark.parametrize(
    ("changed", "families"),
    [
        ("kernels/scatter/kernel.py", {"scatter"}),
        ("kernels/gather/kernel.py", {"gather"}),
        ("kernels/device/memory.py", {"scatter", "gather"}),
        ("kernels/fakes.py", {"scatter", "gather"}),
        ("plans/plan.py", {"scatter", "gather"}),
        ("kernels/scatter/reference.py", set()),
        ("kernels/gather/cases.py", set()),
        # What an op declares is compiled in.
        ("plans/scatter.py", {"scatter"}),
        ("plans/signature.py", {"scatter", "gather"}),
        ("tools/cli/build.py", set()),
    ],
)
def test_a_source_changes_the_keys_of_the_families_that_reach_it(
    sources: Path, before: list[dict[str, object]], changed: str, families: set[str]
) -> None:
    path = sources / "specplan" / changed
    text = path.read_text()
    try:
        path.write_text(text + "\n# another comment\n")
        after = printed(sources)
    finally:
        path.write_text(text)
    differ = {
        family
        for family, old, new in zip(("scatter", "gather"), before, after, strict=True)
        if keys.digest(old) != keys.digest(new)
    }
    assert differ == families
    for old, new in zip(before, after, strict=True):
        assert {name for name in old if old[name] != new[name]} <= {"sources"}


def test_the_key_holds_no_path_directory_or_environment(
    before: list[dict[str, object]], tmp_path: Path
) -> None:
    elsewhere = packs.tree(tmp_path / "elsewhere")
    (elsewhere / "specplan" / "kernels" / "unrelated.py").write_text("value = 1\n")
    (elsewhere / "specplan" / "kernels" / "scatter" / "notes.txt").write_text("unrelated\n")
    environment = {"CUTE_DSL_ARCH": "sm_100a", "CC": "gcc", "PYTHONHASHSEED": "7"}
    after = printed(elsewhere, **environment)
    assert after == before
    assert str(tmp_path) not in json.dumps(after)


def test_the_key_does_not_ask_torch_or_the_driver() -> None:
    full = keys.key(PLAN)
    assert set(full) == {*("format", "symbol", "arch", "options", "sources", "tools", "python")}
    assert set(full["tools"]) <= {"apache-tvm-ffi"} | {
        name for name in full["tools"] if name.startswith("nvidia-cutlass-dsl")
    }
    assert "apache-tvm-ffi" in full["tools"]
    assert json.loads(json.dumps(full)) == full


def test_arch_and_constants_change_the_key() -> None:
    others = [
        Plan("scatter", "scatter", "sm_100a", PLAN.spec),
        Plan("scatter", "scatter", "sm_90a", (*PLAN.spec[:-1], ("lanes", 8))),
    ]
    digests = [keys.digest(keys.key(plan)) for plan in (PLAN, *others)]
    assert len(set(digests)) == 3
    assert f"--gpu-arch {others[0].arch}" in keys.options(others[0])


def test_launch_parameters_do_not_change_the_key() -> None:
    launched = Plan(PLAN.family, PLAN.op, PLAN.arch, PLAN.spec, (("blocks", 3),))
    assert keys.key(launched) == keys.key(PLAN)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("options", lambda plan: "--enable-tvm-ffi --gpu-arch sm_90a --opt-level 2"),
        ("tool_versions", lambda: {"nvidia-cutlass-dsl": "4.8.2", "apache-tvm-ffi": "0.1.15"}),
        ("python", lambda: "3.10"),
        ("FORMAT", keys.FORMAT + 1),
    ],
)
def test_options_tools_python_and_format_change_the_key(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    before = keys.digest(keys.key(PLAN))
    monkeypatch.setattr(keys, name, value)
    assert keys.digest(keys.key(PLAN)) != before


@pytest.mark.parametrize("minor", [10, 11, 12, 13, 14, 20])
def test_only_pythons_known_to_compile_alike_share_a_key(
    monkeypatch: pytest.MonkeyPatch, minor: int
) -> None:
    known = keys.digest(keys.key(PLAN))
    monkeypatch.setattr(sys, "version_info", (3, minor, 0, "final", 0))
    assert (keys.digest(keys.key(PLAN)) == known) == (minor in keys.SAME_BYTES)
    if minor not in keys.SAME_BYTES:
        assert keys.python() == f"3.{minor}"


def test_an_older_python_builds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    with pytest.raises(pipeline.BuildError, match=r"Python 3\.10 .* build with 3\.11 or newer"):
        pipeline.build(load_catalog(), tmp_path / "packs", [PLAN.arch])
    assert not list(tmp_path.iterdir())


def test_every_promised_python_is_one_that_compiles_alike() -> None:
    """``tests/packaging/pythons.py`` compiles with each of these in CI."""
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    start = "Programming Language :: Python :: 3."
    promised = [c.removeprefix(start) for c in project["classifiers"] if c.startswith(start)]
    assert [int(minor) for minor in promised] == list(keys.SAME_BYTES)
    assert project["requires-python"] == f">=3.{keys.SAME_BYTES[0]}"


def test_every_distribution_of_the_compiler_is_a_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    for name, version in (("nvidia_cutlass_dsl_libs_cu99", "9.9"), ("torch", "99.0")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = keys.tool_versions()
    assert found["nvidia-cutlass-dsl-libs-cu99"] == "9.9"
    assert "torch" not in found


def test_the_digest_does_not_depend_on_the_order_of_a_key() -> None:
    full = keys.key(PLAN)
    assert keys.digest(dict(reversed(full.items()))) == keys.digest(full)
    assert keys.digest({**full, "arch": "sm_91a"}) != keys.digest(full)
