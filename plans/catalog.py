"""The catalog: every cell that is claimed to work, read strictly from ``catalog.yaml``.

An unknown key, a duplicate cell, a value out of range or a misspelt name is an error with file,
line, column and the nearest valid spelling. Nothing is defaulted: what the file does not say is not
claimed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml
from specplan.plans.arch import Arch
from specplan.plans.cell import Cell
from specplan.plans.families import FAMILIES
from specplan.plans.family import Family
from specplan.plans.plan import Plan
from specplan.plans.reading import LocatedError, Reader, suggest

SCHEMA = 1
#: More cells than this in one catalog is a slip of the pen (``1..10000000``), not a claim.
MAX_CELLS = 2_000_000


class CatalogError(LocatedError):
    """The catalog does not say what a catalog may say; the message has file, line and column."""


@dataclass(frozen=True)
class Block:
    """Cells that are claimed together, and why."""

    family: str
    problems: tuple[str, ...]
    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    splits: tuple[int, ...] | None
    dtypes: tuple[str, ...]
    certified: tuple[str, ...]
    candidate: tuple[str, ...]
    why: str
    line: int

    @property
    def archs(self) -> tuple[str, ...]:
        return (*self.certified, *self.candidate)


@dataclass(frozen=True)
class Catalog:
    """The parsed catalog. ``claims`` enumerates; ``plans_of(cell)`` applies the planning rule."""

    source: str
    archs: Mapping[str, Arch]
    problems: Mapping[str, Mapping[str, Mapping[str, int]]]
    blocks: tuple[Block, ...]
    #: sha256 of the text.
    digest: str = ""
    #: Every cell, and whether it is claimed to be certified (else it is a candidate).
    claims: Mapping[Cell, bool] = field(default_factory=dict, repr=False)

    def expand(self, block: Block, arch: str) -> Iterator[Cell]:
        """The cells of one block on one arch."""
        family = FAMILIES[block.family]
        facts = self.archs[arch]
        for problem in block.problems:
            geometry = self.problems[block.family][problem]
            for dtype in block.dtypes:
                for tokens in block.tokens:
                    for requests in block.requests:
                        for splits in block.splits or (
                            family.splits(geometry, requests, tokens, dtype, facts),
                        ):
                            yield Cell(block.family, problem, dtype, arch, splits, tokens, requests)

    def cells(self, arch: str | None = None, family: str | None = None) -> list[Cell]:
        """The cells of one arch and family, or of all."""
        return [
            cell
            for cell in self.claims
            if arch in (None, cell.arch) and family in (None, cell.family)
        ]

    def is_automatic(self, cell: Cell) -> bool:
        """Whether a cell's splits are the planning rule's own choice."""
        geometry = self.problems[cell.family][cell.problem]
        return cell.splits == FAMILIES[cell.family].splits(
            geometry, cell.requests, cell.tokens, cell.dtype, self.archs[cell.arch]
        )

    def plans_of(self, cell: Cell) -> tuple[Plan, ...]:
        """The plans that the family's rule gives for a cell, one for each op."""
        return FAMILIES[cell.family].plans(
            self.problems[cell.family][cell.problem],
            cell.requests,
            cell.tokens,
            cell.splits,
            cell.dtype,
            self.archs[cell.arch],
        )


def default_path() -> Path:
    """The catalog of this installation: packaged beside the code, or at the root of a checkout."""
    packaged = Path(__file__).with_name("catalog.yaml")
    if packaged.is_file():
        return packaged
    return Path(__file__).resolve().parent.parent / "catalog.yaml"


def load(path: Path | str | None = None) -> Catalog:
    """Read and check a catalog file.

    Raises
    ------
    CatalogError
        With file, line, column and the nearest valid spelling.
    """
    path = Path(path) if path is not None else default_path()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(str(path), None, f"cannot be read: {error}") from error
    return loads(text, str(path))


def loads(text: str, source: str = "catalog.yaml") -> Catalog:
    """Check a catalog given as text; ``source`` is the name that errors show."""
    reader = _Reader(source)
    node = reader.compose(text, "a catalog")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return replace(reader.catalog(node), digest=digest)


class _Reader(Reader):
    """Reads the catalog's nodes."""

    error = CatalogError

    def catalog(self, node: yaml.Node) -> Catalog:
        top = self.record(node, "the catalog", ("schema", "archs", "families"))
        schema = self.integer(top["schema"], "schema", 0, 1 << 31)
        if schema != SCHEMA:
            raise self.fail(
                top["schema"], f"schema is {schema}, this version of specplan reads {SCHEMA}"
            )
        archs = {
            name: self.arch(name, value)
            for name, (_, value) in self.mapping(top["archs"], "archs").items()
        }
        if not archs:
            raise self.fail(top["archs"], "archs is empty")
        problems: dict[str, Mapping[str, Mapping[str, int]]] = {}
        blocks: list[Block] = []
        for name, (key, value) in self.mapping(top["families"], "families").items():
            if name not in FAMILIES:
                raise self.fail(key, f"unknown family {name!r}{suggest(name, FAMILIES)}")
            family = FAMILIES[name]
            body = self.record(value, f"family {name!r}", ("problems", "cells"))
            problems[name] = {
                problem: self.problem(family, problem, item)
                for problem, (_, item) in self.mapping(
                    body["problems"], f"problems of {name!r}"
                ).items()
            }
            if not isinstance(body["cells"], yaml.SequenceNode):
                raise self.fail(body["cells"], f"cells of {name!r} must be a list of blocks")
            for item in body["cells"].value:
                blocks.append(self.block(family, problems[name], archs, item))
        catalog = Catalog(self.source, archs, problems, tuple(blocks))
        return replace(catalog, claims=self.claims(catalog))

    def arch(self, name: str, node: yaml.Node) -> Arch:
        what = f"arch {name!r}"
        body = self.record(
            node, what, ("device", "capability", "sm_count", "smem_per_sm", "smem_per_cta")
        )
        capability = body["capability"]
        if not isinstance(capability, yaml.SequenceNode) or len(capability.value) != 2:
            raise self.fail(capability, f"capability of {what} must be [major, minor]")
        major, minor = (
            self.integer(item, f"capability of {what}", 0, 99) for item in capability.value
        )
        if name != f"sm_{major}{minor}a":
            raise self.fail(
                capability,
                f"{what} does not name capability {major}.{minor}: expected sm_{major}{minor}a",
            )
        return Arch(
            name,
            (major, minor),
            self.integer(body["sm_count"], f"sm_count of {what}", 1, 1024),
            self.integer(body["smem_per_sm"], f"smem_per_sm of {what}", 1024, 1 << 24),
            self.integer(body["smem_per_cta"], f"smem_per_cta of {what}", 1024, 1 << 24),
            self.text(body["device"], f"device of {what}"),
        )

    def problem(self, family: Family, name: str, node: yaml.Node) -> Mapping[str, int]:
        what = f"problem {name!r} of {family.name!r}"
        body = self.record(node, what, tuple(family.geometry))
        geometry = {
            key: self.integer(body[key], f"{key} of {what}", *family.geometry[key])
            for key in family.geometry
        }
        complaint = family.check_problem(geometry)
        if complaint is not None:
            raise self.fail(node, f"{what}: {complaint}")
        return geometry

    def block(
        self,
        family: Family,
        problems: Mapping[str, Mapping[str, int]],
        archs: Mapping[str, Arch],
        node: yaml.Node,
    ) -> Block:
        what = f"a block of {family.name!r} cells"
        body = self.record(
            node,
            what,
            ("problems", "requests", "tokens", "splits", "dtypes", "why"),
            ("certified", "candidate"),
        )
        splits_node = body["splits"]
        automatic = isinstance(splits_node, yaml.ScalarNode) and splits_node.value == "auto"
        claimed = {
            state: self.names(body[state], state, archs, empty=True) if state in body else ()
            for state in ("certified", "candidate")
        }
        both = set(claimed["certified"]) & set(claimed["candidate"])
        if both:
            raise self.fail(node, f"{', '.join(sorted(both))}: certified and candidate at once")
        if not any(claimed.values()):
            raise self.fail(node, f"{what} names no arch under 'certified' or 'candidate'")
        block = Block(
            family.name,
            self.names(body["problems"], f"problems of {what}", problems),
            self.integers(body["requests"], "requests", 1, 65536),
            self.integers(body["tokens"], "tokens", 1, 1024),
            None if automatic else self.integers(splits_node, "splits", 1, 1024),
            self.names(body["dtypes"], "dtypes", family.dtypes),
            claimed["certified"],
            claimed["candidate"],
            self.text(body["why"], "why"),
            node.start_mark.line + 1,
        )
        for problem in block.problems:
            for tokens in block.tokens:
                complaint = family.check_tokens(problems[problem], tokens)
                if complaint is not None:
                    raise self.fail(body["tokens"], f"problem {problem!r}: {complaint}")
        return block

    def claims(self, catalog: Catalog) -> dict[Cell, bool]:
        """Every cell of every block; a cell that two blocks claim is an error."""
        claims: dict[Cell, bool] = {}
        for block in catalog.blocks:
            size = len(block.problems) * len(block.dtypes) * len(block.tokens)
            size *= len(block.requests) * len(block.archs) * len(block.splits or (1,))
            if len(claims) + size > MAX_CELLS:
                raise self.in_block(block, f"more than {MAX_CELLS:,} cells; is a range too long?")
            for arch in block.archs:
                certified = arch in block.certified
                for cell in catalog.expand(block, arch):
                    if cell in claims:
                        raise self.in_block(block, f"cell claimed twice: {cell}")
                    claims[cell] = certified
        return claims

    def in_block(self, block: Block, problem: str) -> LocatedError:
        return self.error(self.source, yaml.Mark("", 0, block.line - 1, 0, "", 0), problem)
