"""A deployment: which cells a server can reach, and whether each of them is certified and built.

A server owner writes down what the server is started with, and CI asks whether every call that it
can make would launch. The file is small and strict::

    schema: 1
    arch: sm_90a
    max_requests: 64
    draft_lengths: [3]            # drafts a step; a step verifies one token more
    graph_requests: [1, 2, 4, 8, 16, 32, 64]
    eager: false                  # steps run only at the sizes that graphs were captured for
    families:
      scatter: {history: 4, next: 4, draft: 3}
      gather: {next: 4, draft: 3}
      rollback: {problem: qsa12, dtype: int32}

``graph_requests`` are the batch sizes that graphs are captured for; ``eager: true`` adds every size
from 1 to ``max_requests``. A family is given by its geometry, or by a problem's name; ``dtype`` may
be left out where the family has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from specplan.plans.catalog import Catalog
from specplan.plans.cell import Cell, State, nearest
from specplan.plans.coverage import compute
from specplan.plans.families import FAMILIES
from specplan.plans.reading import LocatedError, Reader, suggest

SCHEMA = 1
#: The state of a cell that the server can reach and the catalog does not have.
UNCERTIFIED = "uncertified"


class DeploymentError(LocatedError):
    """The deployment file does not say what it may say; the message has file, line and column."""


@dataclass(frozen=True)
class Use:
    """How a server uses one family."""

    family: str
    geometry: Mapping[str, int]
    dtype: str
    #: Names of the catalog's problems of this geometry; none if the catalog has no such problem.
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Deployment:
    """What a server can reach, from its configuration alone."""

    arch: str
    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Reached:
    """One cell that the server can reach: its state, and where it is a hole, why and what is near.

    ``state`` is a coverage state, or ``uncertified`` for a cell that the catalog does not have.
    """

    cell: Cell
    state: str
    reason: str
    near: tuple[Cell, ...] = ()

    @property
    def holds(self) -> bool:
        """Only a certified and built cell launches."""
        return self.state == State.CERTIFIED.value


@dataclass(frozen=True)
class Answer:
    """The cells of a deployment, and complaints about the pack as a whole."""

    deployment: Deployment
    cells: Sequence[Reached]
    complaints: Sequence[str]

    @property
    def holds(self) -> bool:
        return not self.complaints and all(cell.holds for cell in self.cells)

    @property
    def holes(self) -> list[Reached]:
        return [cell for cell in self.cells if not cell.holds]

    def as_json(self) -> Mapping[str, Any]:
        """``{"holds", "cells": [{cell fields, "state", "reason", "nearest"}], "complaints"}``."""
        return {
            "holds": self.holds,
            "cells": [
                {
                    **reached.cell.as_dict(),
                    "state": reached.state,
                    "reason": reached.reason,
                    "nearest": [near.as_dict() for near in reached.near],
                }
                for reached in self.cells
            ],
            "complaints": list(self.complaints),
        }


def load(path: Path, catalog: Catalog) -> Deployment:
    """Read and check a deployment file.

    Raises
    ------
    DeploymentError
        With file, line, column and the nearest valid spelling.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DeploymentError(str(path), None, f"cannot be read: {error}") from error
    return loads(text, catalog, str(path))


def loads(text: str, catalog: Catalog, source: str = "deployment.yaml") -> Deployment:
    """Check a deployment given as text; ``source`` is the name that errors show."""
    reader = _Reader(source)
    return reader.deployment(reader.compose(text, "a deployment"), catalog)


class _Reader(Reader):
    error = DeploymentError

    def deployment(self, node: yaml.Node, catalog: Catalog) -> Deployment:
        top = self.record(
            node,
            "the deployment",
            ("schema", "arch", "max_requests", "draft_lengths", "families"),
            ("graph_requests", "eager"),
        )
        schema = self.integer(top["schema"], "schema", 0, 1 << 31)
        if schema != SCHEMA:
            raise self.fail(
                top["schema"], f"schema is {schema}, this version of specplan reads {SCHEMA}"
            )
        (arch,) = self.names(top["arch"], "arch", catalog.archs)[:1]
        most = self.integer(top["max_requests"], "max_requests", 1, 65536)
        eager = "graph_requests" not in top
        if "eager" in top:
            eager = self.names(top["eager"], "eager", ("true", "false")) == ("true",)
        requests = set(range(1, most + 1)) if eager else set()
        if "graph_requests" in top:
            requests |= set(self.integers(top["graph_requests"], "graph_requests", 1, most))
        if not requests:
            raise self.fail(node, "eager is false and there are no graph_requests: nothing can run")
        drafts = self.integers(top["draft_lengths"], "draft_lengths", 0, 1023)
        families = self.mapping(top["families"], "families")
        if not families:
            raise self.fail(top["families"], "families is empty")
        uses = []
        for name, (key, value) in families.items():
            if name not in FAMILIES:
                raise self.fail(key, f"unknown family {name!r}{suggest(name, FAMILIES)}")
            uses.append(self.use(name, value, catalog))
        tokens = tuple(length + 1 for length in drafts)
        return Deployment(arch, tuple(sorted(requests)), tokens, tuple(uses))

    def use(self, name: str, node: yaml.Node, catalog: Catalog) -> Use:
        family, what = FAMILIES[name], f"family {name!r}"
        problems = catalog.problems.get(name, {})
        by_name = "problem" in self.mapping(node, what)
        required = ("problem",) if by_name else tuple(family.geometry)
        body = self.record(node, what, required, ("dtype",))
        if by_name:
            (problem,) = self.names(body["problem"], f"problem of {what}", problems)[:1]
            geometry = problems[problem]
        else:
            geometry = {
                key: self.integer(body[key], f"{key} of {what}", *family.geometry[key])
                for key in family.geometry
            }
        if "dtype" in body:
            (dtype,) = self.names(body["dtype"], f"dtype of {what}", family.dtypes)[:1]
        elif len(family.dtypes) == 1:
            (dtype,) = family.dtypes
        else:
            raise self.fail(node, f"{what} lacks 'dtype'; known: {', '.join(family.dtypes)}")
        same = tuple(p for p, values in problems.items() if dict(values) == dict(geometry))
        return Use(name, geometry, dtype, same)


def reachable(deployment: Deployment, catalog: Catalog) -> Iterator[tuple[Use, Cell]]:
    """Every cell that the server can reach, under the problem's name if the catalog has it."""
    arch = catalog.archs[deployment.arch]
    for use in deployment.uses:
        family = FAMILIES[use.family]
        for tokens in deployment.tokens:
            fits = family.check_tokens(use.geometry, tokens) is None
            for requests in deployment.requests:
                splits = 1
                if fits:
                    splits = family.splits(use.geometry, requests, tokens, use.dtype, arch)
                named = [
                    Cell(use.family, name, use.dtype, arch.name, splits, tokens, requests)
                    for name in use.problems or ("?",)
                ]
                yield use, next((cell for cell in named if cell in catalog.claims), named[0])


def answer(
    deployment: Deployment, catalog: Catalog, root: Path, evidence: Sequence[Path]
) -> Answer:
    """Whether every cell that the server can reach is certified and built.

    Parameters
    ----------
    root
        Directory of packs.
    evidence
        Directories of certificates; those beside a pack count too.
    """
    wanted = list(reachable(deployment, catalog))
    claimed = {cell: catalog.claims[cell] for _, cell in wanted if cell in catalog.claims}
    coverage = compute(
        replace(catalog, blocks=(), claims=claimed), root, [deployment.arch], evidence
    )
    rows = {row.cell: row for row in coverage.rows}
    # Cells of the same problem, dtype and arch are nearer than any others, and far fewer.
    certified: dict[tuple[str, ...], list[Cell]] = {}
    for cell, claim in catalog.claims.items():
        if claim:
            certified.setdefault((cell.family,), []).append(cell)
            alike = (cell.family, cell.problem, cell.dtype, cell.arch)
            certified.setdefault(alike, []).append(cell)
    cells = []
    for use, cell in wanted:
        if cell in rows:
            row = rows[cell]
            reason = row.reason
            if row.state is State.CANDIDATE and not reason:
                reason = "built, and not certified on this arch"
            state = row.state.value
        else:
            state = UNCERTIFIED
            complaint = FAMILIES[use.family].check_tokens(use.geometry, cell.tokens)
            shape = ", ".join(f"{key}={value}" for key, value in use.geometry.items())
            reason = complaint or (
                "the catalog has no such cell"
                if use.problems
                else f"no problem of the catalog has {shape}"
            )
        near: tuple[Cell, ...] = ()
        if state != State.CERTIFIED.value:
            alike = (cell.family, cell.problem, cell.dtype, cell.arch)
            choice = certified.get(alike) or certified.get((cell.family,), [])
            near = tuple(nearest(cell, choice, 1))
        cells.append(Reached(cell, state, reason, near))
    return Answer(deployment, cells, coverage.complaints)
