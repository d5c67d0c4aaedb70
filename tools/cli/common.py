"""What all commands share: options, exit codes, finding the catalog, the packs and the evidence."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from specplan.plans import catalog as catalogs
from specplan.plans import certificates, locations
from specplan.plans.catalog import Catalog, CatalogError
from specplan.plans.families import FAMILIES
from specplan.plans.manifest import packs_under
from specplan.plans.reading import suggest

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Commands(click.Group):
    """The command line as a whole, which turns what the system refuses into one line."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            say_refused(error)


def say_refused(error: OSError) -> NoReturn:
    """End with ``error: what: why`` and exit code 1; quietly where a reader closed the pipe."""
    wrong = _cannot_write(sys.stdout)
    if wrong is None and error.filename is None and _was_printing(error):
        wrong = error
    if wrong is not None:
        names = "standard output cannot be written"
    else:
        wrong = error
        names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name)
    detail = wrong.strerror or str(wrong) or type(wrong).__name__
    if wrong.errno != errno.EPIPE and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            click.echo(f"error: {names}: {detail}" if names else f"error: {detail}", err=True)
    _cannot_write(sys.stderr)
    sys.exit(1)


def _was_printing(error: OSError) -> bool:
    """Whether an error comes out of ``click.echo``, the one function that prints."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code is click.echo.__code__ for frame in frames)


def _cannot_write(stream: Any) -> OSError | None:
    """Why a stream takes no more, or None. What it still holds is dropped, so that the interpreter
    does not fail on it once more when it ends.
    """
    if stream is None:
        return None
    try:
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        return error
    return None


def fail(message: str, code: int = 1) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(code)


def read_catalog(path: Path | None) -> Catalog:
    try:
        return catalogs.load(path)
    except CatalogError as error:
        fail(str(error), 2)


def arch_names(catalog: Catalog, names: Sequence[str]) -> list[str]:
    """The archs named, each once; ``all`` means all of the catalog. A misspelt one is a usage
    error.
    """
    wanted: list[str] = []
    for name in names:
        if name == "all":
            wanted.extend(catalog.archs)
        elif name in catalog.archs:
            wanted.append(name)
        else:
            hint = suggest(name, catalog.archs)
            raise click.BadParameter(f"unknown arch {name!r}{hint}", param_hint="--arch")
    return list(dict.fromkeys(wanted))


def one_arch(catalog: Catalog, name: str) -> str:
    """One arch of the catalog; ``all`` and a misspelt one are usage errors."""
    if name == "all":
        known = ", ".join(catalog.archs)
        raise click.BadParameter(
            f"one arch is needed, not 'all'; known: {known}", param_hint="--arch"
        )
    return arch_names(catalog, [name])[0]


def family_names(names: Sequence[str], hint_for: str = "--family") -> tuple[str, ...]:
    for name in names:
        if name not in FAMILIES:
            hint = suggest(name, FAMILIES)
            raise click.BadParameter(f"unknown family {name!r}{hint}", param_hint=hint_for)
    return tuple(dict.fromkeys(names))


def pack_root(path: Path | None, arch: str | None = None) -> Path:
    """The directory of packs: as given, else the first place of the search path that has a pack, or
    one of ``arch``.
    """
    if path is not None:
        return path
    for _, place in locations.search_path():
        found = packs_under(place)
        if found if arch is None else arch in found:
            return place
    return locations.build_directory() or locations.packaged_directory()


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def option_catalog() -> Decorator:
    return click.option(
        "--catalog",
        "catalog_path",
        type=click.Path(path_type=Path),
        help="Catalog file; default: the one that specplan ships.",
    )


def option_packs() -> Decorator:
    return click.option(
        "--packs",
        type=click.Path(path_type=Path),
        help="Directory of packs; default: $SPECPLAN_PACKS, the checkout that specplan runs from, "
        "the installed wheel, the per-user directory.",
    )


def option_certificates() -> Decorator:
    return click.option(
        "--certificates",
        "certificate_path",
        type=click.Path(path_type=Path),
        help="Directory of certificates; default: the ones that specplan ships. "
        "Those beside a pack count too.",
    )


def evidence_directories(path: Path | None) -> list[Path]:
    return [path if path is not None else certificates.default_directory()]


def argument_packs() -> Decorator:
    """A pack, or a directory of packs, as an argument."""
    return click.argument("path", required=False, type=click.Path(path_type=Path))


def named_packs(path: Path | None, packs: Path | None) -> Path | None:
    """The pack or directory of packs that was named, as an argument or with ``--packs``."""
    if path is not None and packs is not None:
        raise click.UsageError(f"two places are named: {path} and --packs {packs}")
    return path if path is not None else packs
