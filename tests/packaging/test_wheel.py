"""The pure wheel in a clean environment, beside packages that have the rooms' names."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from support.packaging_runs import (
    ROOT,
    clean_environment,
    copy_tracked,
    from_index,
    own_packages,
    run,
    start,
)
from support.shared import Shared

# Without build isolation: the environment under test has setuptools, and nothing is downloaded.
PIP_WHEEL = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")


@pytest.fixture(scope="module")
def wheel(shared: Shared) -> Path:
    """The wheel that is built where nobody asks for packs."""

    def build(place: Path) -> None:
        source = copy_tracked(place / "source")
        run(sys.executable, *PIP_WHEEL, "-w", place, source)

    (found,) = shared.made("pure-wheel", build).glob("specplan-*.whl")
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
        if path.endswith(".py") and path not in NOT_INSTALLED:
            installed = path.removeprefix("runtime/") if path.startswith("runtime/") else path
            assert f"specplan/{installed}" in names


#: Tools of the checkout, which an installed package cannot use.
NOT_INSTALLED = ("tools/typecheck.py", "tools/release.py")


def test_what_an_earlier_build_left_in_the_build_folder_is_not_in_the_wheel(
    tmp_path: Path,
) -> None:
    source = copy_tracked(tmp_path / "source")
    left = source / "build" / "lib" / "specplan"
    for name in ("gone.py", "_packs/sm_90a/manifest.json"):
        (left / name).parent.mkdir(parents=True, exist_ok=True)
        (left / name).write_text("left by an earlier build")
    run(sys.executable, *PIP_WHEEL, "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("specplan-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if "gone" in name or "_packs" in name]


def test_specplan_and_hugging_face_kernels_import_side_by_side(wheel: Path, tmp_path: Path) -> None:
    """Hugging Face's ``kernels`` imports torch; that comes from this test's own environment."""
    python = clean_environment(tmp_path / "clean")
    from_index(python, "-m", "pip", "install", "--quiet", wheel, "kernels")
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
    # Behind the clean environment's own packages.
    out = run(python, "-P", "-c", f"import sys; sys.path += {own_packages()!r}\n{code}")
    claims, where = out.split()[-2:]
    assert int(claims) > 100_000
    assert str(tmp_path) in where
    # The command line by either name of the module.
    for module in ("specplan", "specplan.tools.cli"):
        assert "--strict" in run(python, "-P", "-m", module, "coverage", "--help")


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        ("click", "it needs click; pip install click"),
        ("yaml", "it needs yaml; pip install pyyaml"),
        ("specplan.tools", "this installation has no specplan.tools"),
    ],
)
def test_the_command_line_says_what_it_lacks(absent: str, said: str) -> None:
    code = (
        f"import sys, runpy; sys.modules[{absent!r}] = None; sys.argv[1:] = ['--help']\n"
        "runpy.run_module('specplan', run_name='__main__', alter_sys=True)"
    )
    done = start([sys.executable, "-c", code])
    assert done.returncode == 1
    assert said in done.stderr and "Traceback" not in done.stderr


def test_an_arch_that_does_not_exist_fails_the_install_and_says_which(tmp_path: Path) -> None:
    source = copy_tracked(tmp_path / "source")
    done = start(
        [sys.executable, *PIP_WHEEL, "-w", tmp_path / "wheels", source],
        SPECPLAN_ARCHS="sm_90b",
    )
    assert done.returncode != 0
    assert "unknown arch 'sm_90b'; did you mean 'sm_90a'?" in done.stderr + done.stdout
    assert not list(tmp_path.glob("wheels/*"))
