"""From the sources to a pack that loads: sdist, wheel with packs from the sdist in an isolated
build, a clean environment. And packs are of the sources in their wheel, whatever else is there.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

#: One plan, claimed by nobody: packs of it compile in seconds.
SMALL_CATALOG = """\
schema: 1
archs:
  sm_90a:
    {device: NVIDIA H200, capability: [9, 0], sm_count: 132, smem_per_sm: 233472, smem_per_cta:
    232448}
families:
  scatter:
    problems:
      mtp3: {history: 4, next: 4, draft: 3}
    cells:
      - {problems: [mtp3], requests: 1..4, tokens: 1..4, splits: 1, dtypes: [int32],
         candidate: [sm_90a], why: tests}
"""
ASKED = {"SPECPLAN_ARCHS": "sm_90a", "SPECPLAN_FAMILIES": "scatter"}


def small_source(to: Path) -> Path:
    """The sources with a catalog of one plan, and device code that no other copy has."""
    source = copy_tracked(to)
    (source / "catalog.yaml").write_text(SMALL_CATALOG)
    kernel = source / "kernels" / "scatter" / "kernel.py"
    kernel.write_text(kernel.read_text() + "\n# the sources of this wheel\n")
    return source


def packed_manifest(wheel: Path) -> Mapping[str, Any]:
    with zipfile.ZipFile(wheel) as archive:
        found: Mapping[str, Any] = json.loads(archive.read("specplan/_packs/sm_90a/manifest.json"))
    return found


def assert_packs_are_of_the_wheel(wheel: Path) -> None:
    """Every source that a plan was compiled from is a file of the wheel, byte for byte."""
    sources = {
        item
        for plan in packed_manifest(wheel)["plans"].values()
        for item in plan["key"]["sources"].items()
    }
    assert "specplan.kernels.scatter.kernel" in dict(sources)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for module, digest in sources:
            path = module.replace(".", "/")
            file = f"{path}.py" if f"{path}.py" in names else f"{path}/__init__.py"
            assert hashlib.sha256(archive.read(file)).hexdigest() == digest, module


@pytest.fixture(scope="module")
def released(shared: Shared) -> Path:
    """What ``make release`` makes of a checkout, for one arch and family: the sdist, the pure wheel
    from it, and the wheel with packs from it, all in isolated builds that install what they need.
    """

    def release(place: Path) -> None:
        source = copy_tracked(place / "checkout")
        chosen = ("--arch", "sm_90a", "--family", "scatter")
        out = place / "dist"
        from_index(sys.executable, source / "tools" / "release.py", "--out", out, *chosen)

    return shared.made("release", release) / "dist"


@pytest.fixture(scope="module")
def sdist(released: Path) -> Path:
    (found,) = released.glob("specplan-*.tar.gz")
    return found


@pytest.fixture(scope="module")
def with_packs(released: Path) -> Path:
    (found,) = released.glob("specplan-*-manylinux*.whl")
    return found


def test_the_sdist_holds_what_git_tracks(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        }
    tracked = set(filter(None, run("git", "-C", ROOT, "ls-files", "-z").split("\0")))
    tracked = {name for name in tracked if (ROOT / name).is_file()}
    assert tracked - names == set()
    made = {name for name in names - tracked if not name.startswith("specplan.egg-info/")}
    assert made == {"PKG-INFO", "setup.cfg"}


def test_a_wheel_from_the_sdist_is_the_wheel_from_the_checkout(
    released: Path, tmp_path: Path
) -> None:
    source = copy_tracked(tmp_path / "source")
    options = ("--quiet", "--no-deps", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", tmp_path, source)
    (from_checkout,) = tmp_path.glob("specplan-*.whl")
    (from_sdist,) = released.glob("specplan-*-none-any.whl")
    contents = []
    for wheel in (from_sdist, from_checkout):
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if ".dist-info/" not in n]
            contents.append({name: archive.read(name) for name in names})
    assert contents[0] == contents[1]


def test_a_wheel_with_packs_is_for_one_platform_and_holds_what_a_runtime_reads(
    with_packs: Path,
) -> None:
    assert f"-py3-none-manylinux_2_28_{platform.machine()}.whl" in with_packs.name
    names = zipfile.ZipFile(with_packs).namelist()
    packs = [n for n in names if "_packs/" in n and not n.endswith("/")]
    assert sorted(Path(n).suffix for n in packs) == [".json", ".so"]
    assert {Path(n).parent.as_posix() for n in packs} == {"specplan/_packs/sm_90a"}
    assert_packs_are_of_the_wheel(with_packs)


def test_a_release_lists_its_files_by_size_and_digest(released: Path) -> None:
    found = json.loads((released / "release.json").read_text())
    files = {path.name for path in released.glob("specplan-*")}
    assert set(found) == files and len(files) == 3
    sums = [
        f"{hashlib.sha256((released / name).read_bytes()).hexdigest()}  {name}" for name in found
    ]
    assert (released / "SHA256SUMS").read_text().splitlines() == sums
    for name, entry in found.items():
        assert entry["size"] == (released / name).stat().st_size
        assert list(entry["packs"]) == (["sm_90a"] if "manylinux" in name else [])
        for pack in entry["packs"].values():
            with zipfile.ZipFile(released / name) as archive:
                for file, said in pack["files"].items():
                    data = archive.read(f"specplan/_packs/{file}")
                    assert said["size"] == len(data) > said["compressed"]
                    assert said["sha256"] == hashlib.sha256(data).hexdigest()


def test_a_release_goes_into_no_folder_that_holds_another(released: Path) -> None:
    done = start([sys.executable, ROOT / "tools" / "release.py", "--out", released])
    assert done.returncode == 1
    assert "holds files of another release" in done.stderr


def test_an_installed_wheel_with_packs_holds_its_claims_and_loads(
    with_packs: Path, tmp_path: Path
) -> None:
    python = clean_environment(tmp_path / "server")
    from_index(python, "-m", "pip", "install", "--quiet", with_packs)
    home = {"HOME": str(tmp_path), "XDG_DATA_HOME": ""}
    specplan = python.with_name("specplan")
    out = run(specplan, "coverage", "--arch", "sm_90a", "--family", "scatter", **home)
    assert out.splitlines()[-1] == "every claim holds"
    assert str(tmp_path) in run(specplan, "verify", **home)
    code = (
        f"import sys; sys.path += {own_packages()!r}\n"
        "import specplan; pack = specplan.load(arch='sm_90a')\n"
        "print(specplan.__file__, pack)\n"
    )
    assert str(tmp_path) in run(python, "-P", "-c", code, **home)


@pytest.mark.parametrize("decoy", ["path", "finder"])
def test_packs_are_of_the_wheels_own_sources_beside_another_specplan(
    decoy: str, tmp_path: Path
) -> None:
    """Another specplan that builds as well, first on ``PYTHONPATH`` or behind a finder that is
    asked first, beside the editable install that this test's environment has.
    """
    source = small_source(tmp_path / "source")
    other = tmp_path / "other"
    rooms = {"": "runtime", "plans": "plans", "kernels": "kernels", "tools": "tools"}
    for room, place in rooms.items():
        for path in (ROOT / place).rglob("*.py"):
            target = other / "specplan" / room / path.relative_to(ROOT / place)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (other / "specplan" / "plans" / "catalog.yaml").write_text(SMALL_CATALOG)
    if decoy == "finder":
        (other / "sitecustomize.py").write_text(
            "import sys\nfrom importlib.machinery import PathFinder\n"
            "class Other:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name == 'specplan': return PathFinder.find_spec(name, [{str(other)!r}])\n"
            "sys.meta_path.insert(0, Other())\n"
        )
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", tmp_path, source, **ASKED, PYTHONPATH=str(other))
    (wheel,) = tmp_path.glob("specplan-*.whl")
    assert_packs_are_of_the_wheel(wheel)
    digest = hashlib.sha256((source / "kernels" / "scatter" / "kernel.py").read_bytes())
    (plan,) = packed_manifest(wheel)["plans"].values()
    assert plan["key"]["sources"]["specplan.kernels.scatter.kernel"] == digest.hexdigest()


def test_packs_of_other_sources_make_no_wheel(tmp_path: Path) -> None:
    """The check at the end, with a build step that goes wrong: it compiles a changed kernel."""
    source = small_source(tmp_path / "source")
    setup = source / "setup.py"
    text = setup.read_text()
    wrong = text.replace(
        "check_sources(package, out)",
        "(package / 'kernels' / 'fakes.py').open('a').write('# changed after the build')\n"
        "            check_sources(package, out)",
    )
    assert wrong != text
    setup.write_text(wrong)
    options = ("--quiet", "--no-deps", "--no-build-isolation")
    done = start([sys.executable, "-m", "pip", "wheel", *options, "-w", tmp_path, source], **ASKED)
    assert done.returncode != 0
    said = "was compiled from another specplan.kernels.fakes than the one of this wheel"
    assert said in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_claims_that_do_not_hold_make_no_wheel(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source")
    (source / "catalog.yaml").write_text(SMALL_CATALOG.replace("candidate:", "certified:"))
    (source / "certificates" / "sm_90a" / "scatter.yaml").unlink()
    options = ("--quiet", "--no-deps", "--no-build-isolation")
    done = start([sys.executable, "-m", "pip", "wheel", *options, "-w", tmp_path, source], **ASKED)
    assert done.returncode != 0
    assert "claims do not hold" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_an_editable_install_builds_the_packs_of_its_checkout(tmp_path: Path) -> None:
    """The hooks that pip calls: what they install first, and where the packs go."""
    source = small_source(tmp_path / "source")
    hooks = "import sys; sys.path.insert(0, 'backend'); import specplan_backend as backend\n"
    requires = hooks + "print('needs', backend.get_requires_for_build_editable())"
    asked = run(sys.executable, "-c", requires, cwd=source, **ASKED).partition("needs ")[2]
    assert "nvidia-cutlass-dsl" in asked and "click" in asked
    unasked = run(sys.executable, "-c", requires, cwd=source).partition("needs ")[2]
    assert unasked and "nvidia-cutlass-dsl" not in unasked
    for host, cross in (("aarch64", "x86_64"), ("x86_64", "aarch64")):
        # Another host takes pip, and a linker where the machine has none for it.
        named = {"SPECPLAN_HOST": host, "PATH": "", f"CC_{host}": ""}
        needs = run(sys.executable, "-c", requires, cwd=source, **ASKED, **named)
        assert ("ziglang" in needs and "'pip'" in needs) == (platform.machine() == cross)
    build = hooks + f"backend.build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=source)
    assert not (source / "packs").exists()
    run(sys.executable, "-c", build, cwd=source, **ASKED)
    found = json.loads((source / "packs" / "sm_90a" / "manifest.json").read_text())
    digest = hashlib.sha256((source / "kernels" / "scatter" / "kernel.py").read_bytes())
    (plan,) = found["plans"].values()
    assert plan["key"]["sources"]["specplan.kernels.scatter.kernel"] == digest.hexdigest()
