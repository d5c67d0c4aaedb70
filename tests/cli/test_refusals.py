"""What the system refuses is one line and exit code 1: files, directories, the output itself."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from specplan.tools.cli import main

from support import synthetic
from support.synthetic import Place, specplan

FULL = "/dev/full"
needs_dev_full = pytest.mark.skipif(not Path(FULL).exists(), reason=f"needs {FULL}")

#: Every command in a form that prints something, with what it needs.
PRINTING = {
    "help": lambda place: ["--help"],
    "version": lambda place: ["--version"],
    "coverage": lambda place: ["coverage", *place.options],
    "coverage --json": lambda place: ["coverage", *place.options, "--json"],
    "explain": lambda place: [
        *("explain", "scatter", "requests=1", "tokens=1", "problem=small", "--arch", "sm_90a"),
        *place.options,
    ],
    "verify": lambda place: ["verify", "--packs", place.packs],
    "list": lambda place: ["list", "cells", "--packs", place.packs],
    "gc": lambda place: ["gc", "--dry-run", "--packs", place.packs],
}


def process(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specplan.tools.cli", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
        **options,
    )


@needs_dev_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("name", PRINTING)
def test_an_output_that_takes_nothing_is_one_line_and_exit_1(
    place: Place, name: str, unbuffered: str
) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path(FULL).open("w") as full:
        ran = process(*PRINTING[name](place), stdout=full, env=env)
    said = f"error: standard output cannot be written: {os.strerror(errno.ENOSPC)}\n"
    assert (ran.returncode, ran.stderr) == (1, said)


@needs_dev_full
def test_nowhere_to_say_it_is_still_exit_1() -> None:
    with Path(FULL).open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "specplan.tools.cli", "--help"],
            stdout=full,
            stderr=full,
            check=False,
        )
    assert ran.returncode == 1


@pytest.mark.parametrize("name", ["help", "list", "coverage --json"])
def test_a_reader_that_went_away_is_exit_1_without_a_word(place: Place, name: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = process(*PRINTING[name](place), stdout=writer)
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, "")


@pytest.mark.parametrize("name", ["--svg", "--html"])
def test_a_picture_on_a_full_disk_names_the_file(place: Place, name: str) -> None:
    if not Path(FULL).exists():
        pytest.skip(f"needs {FULL}")
    ran = specplan("coverage", *place.options, name, FULL)
    assert (ran.code, ran.err) == (
        1,
        f"error: {FULL} cannot be written (No space left on device)\n",
    )


def refuse(kind: type[OSError], number: int) -> Callable[..., Any]:
    def refused(self: Path, *_: Any, **__: Any) -> Any:
        raise kind(number, os.strerror(number), str(self))

    return refused


@pytest.mark.parametrize(
    ("kind", "number"),
    [(PermissionError, errno.EACCES), (OSError, errno.ENOSPC), (OSError, errno.EROFS)],
)
def test_gc_and_merge_where_nothing_may_be_written(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[OSError], number: int
) -> None:
    dead = place.packs / "objects" / f"{'a' * 64}.o"
    dead.parent.mkdir(exist_ok=True)
    dead.write_bytes(b"dead")
    os.utime(dead, (1, 1))
    for method in ("unlink", "mkdir", "open", "write_text", "write_bytes"):
        if method != "open":
            monkeypatch.setattr(Path, method, refuse(kind, number))
    ran = specplan("gc", "--packs", place.packs)
    assert (ran.code, "deleted 1" in ran.out) == (1, False)
    assert ran.err.startswith("error: ") and os.strerror(number) in ran.err
    assert ran.err.count("\n") == 1
    assert dead.exists()
    parts = sorted((place.certificates / "sm_90a").glob("*.yaml"))
    ran = specplan("certify", "merge", parts[0], "--out", tmp_path / "new" / "merged")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: ") and os.strerror(number) in ran.err
    assert ran.err.count("\n") == 1


#: Runs commands, one a line of standard input, as a user who may write nowhere, and says of each
#: how it ended. It imports first what this user may not be able to read afterwards.
AS_NOBODY = """
import email.feedparser, email.header, email.parser, email.policy, json, os, sys
import specplan.plans.device_code, specplan.tools.build.keys, specplan.tools.deployment_report
import specplan.library, specplan.tools.cli
import specplan.tools.grids, specplan.tools.inventory, specplan.tools.merge, specplan.tools.picture
from support import synthetic
specplan.tools.build.keys.tool_versions()
os.setgid(54321)
os.setuid(54321)
for line in sys.stdin:
    ran = synthetic.specplan(*json.loads(line))
    print(json.dumps([ran.code, ran.out, ran.err]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user who may write nowhere")
def test_a_user_without_permission_gets_one_line_and_no_traceback() -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        place = synthetic.place(root / "place")
        dead = place.packs / "objects" / f"{'a' * 64}.o"
        dead.parent.mkdir()
        dead.write_bytes(b"dead")
        os.utime(dead, (1, 1))
        secret = root / "secret"
        (secret / "sm_90a").mkdir(parents=True)
        for path in (root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        secret.chmod(0o700)
        part = sorted((place.certificates / "sm_90a").glob("*.yaml"))[0]
        served = ["--server", "vllm", "--max-requests", "3"]
        commands = {
            "deleting": ["gc", "--packs", place.packs],
            "merging": ["certify", "merge", part, "--out", root / "new"],
            "drawing": ["coverage", *place.options, "--svg", root / "x.svg"],
            "listing": ["list", "--packs", secret],
            "verifying": ["verify", "--packs", secret],
            "sizing": ["size", "--packs", secret],
            "covering": ["coverage", *place.options, "--packs", secret],
            "deploying": ["coverage", "--deployment", secret / "server.yaml"],
            "deriving": ["coverage", "--model", secret / "config.json", *served],
        }
        lines = [json.dumps([str(word) for word in words]) for words in commands.values()]
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY],
            input="\n".join(lines),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(synthetic.__file__).parents[1])},
        )
        assert done.returncode == 0, done.stderr
        answers = dict(zip(commands, map(json.loads, done.stdout.splitlines()), strict=True))
        assert dead.exists()
        for name, (code, _, err) in answers.items():
            assert code in (1, 2), name
            assert "Traceback" not in err and "rror: " in err, name
        for name in ("deleting", "merging"):
            code, out, err = answers[name]
            assert (code, out) == (1, ""), name
            assert err.startswith("error: ") and ": Permission denied" in err, name
            assert err.count("\n") == 1, name


def test_every_command_answers_an_error_of_the_system_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a command's own code lets through, with the names that the error carries."""
    for name, command in main.commands.items():

        def refused(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/file", None, "another")

        monkeypatch.setattr(command, "parse_args", refused)
        ran = specplan(name)
        said = "error: a/file -> another: No space left on device\n"
        assert (ran.code, ran.out, ran.err) == (1, "", said), name


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "scatter", "requests=1", "tokens=1", "problem=mtp7", "--arch", "all"),
        ("explain", "scatter", "requests=1", "tokens=1", "problem=mtp7", "--arch", "sm_90"),
    ],
)
def test_a_command_for_one_arch_takes_one(arguments: tuple[str, ...]) -> None:
    ran = specplan(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "sm_90a" in ran.err


def test_all_archs_of_a_list_are_every_one(place: Place) -> None:
    for command in (("list", "packs"), ("list", "plans"), ("size",)):
        wanted = specplan(*command, "--packs", place.packs)
        assert "sm_90a" in wanted.out and "sm_100a" in wanted.out
        assert specplan(*command, "--packs", place.packs, "--arch", "all") == wanted


def test_an_option_for_an_arch_never_ends_in_a_traceback(place: Place) -> None:
    """Every command that has one, with every word that users have tried there."""
    needed = {"explain": ["scatter", "requests=1", "tokens=1", "problem=small"]}
    for name, command in main.commands.items():
        options = {each.name for each in command.params if isinstance(each, click.Option)}
        if not options & {"arch", "archs"} or name in ("build", "certify"):
            continue
        mine = place.options if "catalog_path" in options else ["--packs", str(place.packs)]
        for arch in ("all", "sm_90", "", "sm_90a,sm_100a", "auto"):
            ran = specplan(name, *needed.get(name, []), "--arch", arch, *mine)
            assert ran.code in (0, 1, 2), (name, arch)
            if ran.code:
                assert "rror: " in ran.err or "wrong: " in ran.err, (name, arch)


def test_malformed_catalogs_and_deployments_are_both_exit_2(place: Place, tmp_path: Path) -> None:
    """Broken in the same ways, the two files that a person writes get the same exit code."""
    deployment = tmp_path / "server.yaml"
    good = place.catalog_path.read_text(encoding="utf-8")
    for text in ("", "a: [", "schema: 7\n", "[]", "schema: 1\nnonsense: 2\n", "\0"):
        deployment.write_text(text, encoding="utf-8")
        place.catalog_path.write_text(good, encoding="utf-8")
        ran = specplan("coverage", *place.options, "--deployment", deployment)
        assert (ran.code, ran.out) == (2, ""), text
        assert ran.err.startswith(f"error: {deployment}")
        place.catalog_path.write_text(text, encoding="utf-8")
        for command in ("coverage", "build", "explain"):
            asked = PRINTING[command](place) if command in PRINTING else ["build"]
            if command == "build":
                asked += ["--dry-run", "--catalog", place.catalog_path, "--out", tmp_path / "out"]
            ran = specplan(*asked)
            assert (ran.code, ran.out) == (2, ""), (command, text)
            assert ran.err.startswith(f"error: {place.catalog_path}")
    for path in ("/nowhere/at/all.yaml", str(tmp_path)):
        options = ["--packs", str(place.packs)]
        assert specplan("coverage", *options, "--catalog", path).code == 2
        synthetic_catalog = tmp_path / "catalog-2.yaml"
        synthetic_catalog.write_text(synthetic.CATALOG, encoding="utf-8")
        with_catalog = [*options, "--catalog", synthetic_catalog]
        assert specplan("coverage", *with_catalog, "--deployment", path).code == 2
