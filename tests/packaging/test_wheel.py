"""The wheel in a clean environment, beside packages that have the rooms' names."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel, built from the tracked files and nothing else that lies in the tree."""
    source = tmp_path_factory.mktemp("source")
    tracked = run("git", "-C", ROOT, "ls-files", "-z").split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, *PIP_WHEEL, "-w", out, source)
    (found,) = out.glob("specplan-*.whl")
    yield found


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
