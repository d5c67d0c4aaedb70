"""The wheel in a clean environment, beside packages that have the rooms' names."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

# Without build isolation: the environment under test has setuptools, and nothing is downloaded.
PIP_WHEEL = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
ROOT = Path(__file__).resolve().parent.parent.parent


def run(*command: str | Path, **more: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env={**os.environ, **more},
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files and nothing else that lies in the tree."""
    copy = tmp_path_factory.mktemp("source")
    tracked = run("git", "-C", ROOT, "ls-files", "-z").split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built where nobody asks for packs."""
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, *PIP_WHEEL, "-w", out, source, SPECPLAN_ARCHS="")
    (found,) = out.glob("specplan-*.whl")
    return found


def test_the_wheel_is_pure_python_and_installs_one_name(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"specplan"}
    for needed in (
        "specplan/plans/catalog.yaml",
        "specplan/plans/certificates/sm_90a/scatter.yaml",
        "specplan/kernels/scatter/kernel.py",
        "specplan/kernels/rollback/reference.py",
        "specplan/tools/build/worker.py",
        "specplan/py.typed",
    ):
        assert needed in names
    assert not [name for name in names if name.endswith((".so", ".o"))]


def test_every_module_of_the_rooms_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "-C", ROOT, "ls-files", "runtime", "plans", "kernels", "tools").split()
    for path in tracked:
        if path.endswith(".py") and path != "tools/typecheck.py":
            installed = path.removeprefix("runtime/") if path.startswith("runtime/") else path
            assert f"specplan/{installed}" in names


def test_specplan_and_hugging_face_kernels_import_side_by_side(wheel: Path, tmp_path: Path) -> None:
    """Hugging Face's ``kernels`` imports torch; that comes from this test's own environment."""
    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    install = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", str(wheel), "kernels"],
        capture_output=True,
        text=True,
        check=False,
    )
    if install.returncode != 0 and not os.environ.get("CI"):
        pytest.skip(f"no package index to install `kernels` from: {install.stderr[-300:]}")
    assert install.returncode == 0, install.stderr
    code = (
        "import kernels, specplan, specplan.plans, specplan.kernels, importlib.metadata as m\n"
        "assert 'huggingface' in str(m.metadata('kernels')).lower(), 'another kernels package'\n"
        "assert specplan.kernels is not kernels and hasattr(kernels, 'get_kernel')\n"
        "import importlib.util as u\n"
        "assert u.find_spec('plans') is None and u.find_spec('runtime') is None\n"
        "assert u.find_spec('build_plans') is None\n"
        "from specplan.plans.catalog import load; print(len(load().claims))\n"
        "print(specplan.__file__)\n"
    )
    # Behind the clean environment's own packages, and after its path is set up: editable installs
    # of this test's environment do not take part.
    site = sysconfig.get_paths()["purelib"]
    out = run(python, "-c", f"import sys; sys.path.append({site!r})\n{code}", PYTHONSAFEPATH="1")
    claims, where = out.split()[-2:]
    assert int(claims) > 100_000
    assert str(tmp_path) in where
    run(python, "-m", "specplan.tools.cli", "coverage", "--help")


@pytest.fixture(scope="module")
def with_packs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the sm_90a pack of one family, as ``SPECPLAN_ARCHS=sm_90a pip wheel .`` does."""
    out = tmp_path_factory.mktemp("with-packs")
    asked = {"SPECPLAN_ARCHS": "sm_90a", "SPECPLAN_FAMILIES": "scatter"}
    run(sys.executable, *PIP_WHEEL, "-w", out, source, **asked)
    (found,) = out.glob("specplan-*.whl")
    return found


def test_a_wheel_with_packs_is_for_one_platform_and_holds_what_a_runtime_reads(
    with_packs: Path,
) -> None:
    assert "-py3-none-linux_" in with_packs.name
    packs = [n for n in zipfile.ZipFile(with_packs).namelist() if "_packs/" in n]
    assert sorted(Path(n).suffix for n in packs) == [".json", ".so"]
    assert {Path(n).parent.as_posix() for n in packs} == {"specplan/_packs/sm_90a"}


def test_an_installed_wheel_with_packs_is_found_and_holds_its_claims(
    with_packs: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "server", with_pip=True)
    binaries = tmp_path / "server" / "bin"
    install = [str(binaries / "python"), "-m", "pip", "install", "--quiet", str(with_packs)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode != 0 and not os.environ.get("CI"):
        pytest.skip(f"no package index to install click and pyyaml from: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    clean = {"SPECPLAN_PACKS": "", "PYTHONPATH": "", "HOME": str(tmp_path), "XDG_DATA_HOME": ""}
    out = run(
        *(binaries / "specplan", "coverage", "--arch", "sm_90a", "--family", "scatter"), **clean
    )
    assert out.splitlines()[-1] == "every claim holds"
    assert str(tmp_path) in run(binaries / "specplan", "verify", **clean)


def test_an_arch_that_does_not_exist_fails_the_install_and_says_which(
    source: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, *PIP_WHEEL, "-w", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        env={**os.environ, "SPECPLAN_ARCHS": "sm_90b"},
        check=False,
    )
    assert done.returncode != 0
    assert "unknown arch 'sm_90b'; did you mean 'sm_90a'?" in done.stderr + done.stdout
    assert not list(tmp_path.iterdir())
