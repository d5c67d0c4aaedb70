"""What the runtime's modules know of each other, and what type checkers and editors know of its
ops: a call of an op is a function made from a declaration, and its signature is written out once
more in the op's class, for people.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import specplan  # noqa: E402
from specplan import conv_verify, families, op, rollback  # noqa: E402
from specplan import gdn_replay as gdn  # noqa: E402
from specplan.plans.families import SIGNATURES  # noqa: E402

ROOM = Path(specplan.__path__[0])
CLASSES: dict[tuple[str, str], type[op.Op]] = {
    (each.declared.family, each.declared.name): each
    for each in (
        *(families.Scatter, families.Gather, families.SparseGqaVerify, families.StepSetup),
        families.Argmax,
        families.Stage,
        families.Accept,
        *(conv_verify.ConvVerify, conv_verify.Import, conv_verify.Export),
        families.DraftStep,
        *(rollback.SaveRows, rollback.RestoreRows, rollback.Commit),
        *(gdn.VerifyStep, gdn.Advance, gdn.Materialize, gdn.Reset),
    )
}


def imported(path: Path) -> Iterator[str]:
    """The runtime's modules that a file imports, wherever and for whatever in it."""
    modules = {each.stem for each in ROOM.glob("*.py")}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "specplan":
                yield from (alias.name for alias in node.names if alias.name in modules)
            elif node.module.startswith("specplan."):
                name = node.module.split(".")[1]
                if name in modules:
                    yield name


def test_the_runtime_has_no_import_circle() -> None:
    graph = {
        path.stem: set(imported(path)) for path in ROOM.glob("*.py") if path.stem != "__init__"
    }
    assert sum(map(len, graph.values())) > 20
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {name for name, needs in graph.items() if name not in done and needs <= done}
        assert ready, {name: needs - done for name, needs in graph.items() if name not in done}
        done |= ready


def test_pack_names_no_family() -> None:
    text = (ROOM / "pack.py").read_text(encoding="utf-8")
    assert not [family for family in SIGNATURES if re.search(rf"[\"'.]{family}\b", text)]


def test_every_op_has_a_class_and_every_class_an_op() -> None:
    declared = {(family, name) for family, ops in SIGNATURES.items() for name in ops}
    assert set(CLASSES) == declared


@pytest.mark.parametrize("at", CLASSES, ids=".".join)
def test_the_signature_for_people_is_the_declared_one(at: tuple[str, str]) -> None:
    kind = CLASSES[at]
    written = list(inspect.signature(kind.__call__).parameters.values())[1:]
    assert [p.name for p in written] == [p.name for p in kind.declared.parameters]
    annotations = kind.__call__.__annotations__
    names = {"tensor": "torch.Tensor", "int": "int", "float": "float", "choice": "VScaleOrder"}
    for parameter, declared in zip(written, kind.declared.parameters, strict=True):
        assert (parameter.default is not inspect.Parameter.empty) == declared.optional, parameter
        keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert keyword == declared.keyword, parameter
        annotation = annotations[parameter.name]
        expected = names.get(declared.kind, declared.kind)
        assert annotation.removeprefix("planning.").startswith(expected), parameter
        assert annotation.endswith(" | None") == declared.optional, parameter


SCRIPT = """
import specplan
import torch

pack: specplan.Pack = specplan.load()
t = torch.zeros(1)
reveal_type(pack.scatter)
reveal_type(pack.scatter(t, t, t, t, t, t, t, t, t, 0, 1))
pack.scatter(t, t, t, t, t, t, t, t, t, 0)
pack.scatter(t, t, t, t, t, t, t, t, t, 0, "1")
pack.sparse_gqa_verify(t, t, t, t, t, t, t, tokens=4, softmax_scale=0.5, spilts=2)
pack.gdn_replay.verify(t, t, t, t, t, t, t, t, t, t)
pack.nosuch
"""


#: In place of torch's own annotations, which take a type checker a minute to read.
TORCH = """
from typing import Any

class Tensor:
    def __getattr__(self, name: str) -> Any: ...

def zeros(*shape: int) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
"""


def test_type_checkers_know_the_ops(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    package = tmp_path / "specplan"
    package.mkdir()
    for path in ROOM.iterdir():
        if path.suffix == ".py" or path.name == "py.typed":
            (package / path.name).symlink_to(path)
    for room in ("plans", "kernels"):
        (package / room).symlink_to(Path(__import__(f"specplan.{room}").__dict__[room].__path__[0]))
    (tmp_path / "torch.pyi").write_text(TORCH)
    script = tmp_path / "server.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--follow-imports=silent", "--no-error-summary"),
            *("--ignore-missing-imports", "--cache-dir", str(tmp_path / "cache"), str(script)),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    said = done.stdout
    lines = {number: text for number, text in enumerate(SCRIPT.splitlines(), 1) if text}

    def about(number: int) -> str:
        return "\n".join(line for line in said.splitlines() if f"server.py:{number}:" in line)

    def at(text: str) -> int:
        return next(number for number, line in lines.items() if line.startswith(text))

    assert 'Revealed type is "specplan.scatter.Scatter"' in about(at("reveal_type(pack.scatter)"))
    revealed = about(at("reveal_type(pack.scatter("))
    assert "bool" in revealed and "Uncertified" in revealed, said
    assert 'Missing positional argument "rows"' in about(at("pack.scatter(t, t, t, t, t, t, t, t"))
    wrong = about(at("pack.scatter(t, t, t, t, t, t, t, t, t, 0, "))
    assert 'incompatible type "str"; expected "int"' in wrong, said
    assert 'Unexpected keyword argument "spilts"' in about(at("pack.sparse_gqa_verify(")), said
    assert 'expected "Pool"' in about(at("pack.gdn_replay.verify(")), said
    assert 'has no attribute "nosuch"' in about(at("pack.nosuch")), said


def test_editors_see_the_signature_and_the_text_of_a_call() -> None:
    """What a running interpreter shows: a call is a function with its own parameters."""

    class Nothing:
        _ops: typing.ClassVar[list[Any]] = []

    call = families.Scatter(Nothing()).call  # type: ignore[arg-type]
    assert list(inspect.signature(call).parameters)[-2:] == ["row_begin", "rows"]
    assert list(inspect.signature(call.bind).parameters)[-2:] == ["row_begin", "rows"]
    assert "torch's current stream" in call.__doc__
    assert "row_begin, rows" in inspect.getsource(call), "tracebacks show the text"
