"""``specplan gc``: delete what no manifest refers to."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import click
from specplan.plans import manifest
from specplan.plans.families import FAMILIES
from specplan.plans.hosts import HOSTS
from specplan.plans.manifest import ManifestError, packs_under
from specplan.tools.cli.common import (
    argument_packs,
    fail,
    named_packs,
    option_packs,
    pack_root,
)

_FAMILY = f"(?:{'|'.join(FAMILIES)})"
#: Names that a build gives in a pack's directory, what a killed build leaves among them.
_IN_A_PACK = re.compile(
    rf"{_FAMILY}(?:-[a-z0-9_]+)*-[0-9a-f]{{16}}\.so"
    rf"|\.{_FAMILY}(?:-[a-z0-9_]+)*\.\d+\.tmp\.so"
    rf"|\.{re.escape(manifest.NAME)}\.\d+\.tmp"
)
#: And in the directory of objects beside the packs.
_IN_OBJECTS = re.compile(
    r"[0-9a-f]{64}\.(?:o|json)|\.[0-9a-f]{64}\.\d+\.o\.tmp|\.[0-9a-f]{64}\.json\.\d+\.tmp"
)


@click.command("gc")
@argument_packs()
@click.option(
    "--older-than",
    default=3600,
    show_default=True,
    help="Only files that are older than this many seconds.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be deleted.")
@option_packs()
def gc_command(path: Path | None, older_than: int, dry_run: bool, packs: Path | None) -> None:
    """Delete objects and shared objects that no manifest refers to.

    Only files whose names a build gives, and only in packs and the directory of objects beside
    them, while no build runs there. Young files are kept, because somebody may be looking at them.
    """
    root = pack_root(named_packs(path, packs))
    found = packs_under(root)
    if not found:
        fail(f"no pack under {root}; nothing was deleted")
    from specplan.tools.locking import exclusive

    try:
        with exclusive(root, lambda text: click.echo(text, err=True)):
            # Read under the lock: a build that has just ended may have written other names.
            _collect(root, older_than, dry_run)
    except OSError as error:
        if error.filename is None:
            raise  # the output takes no more; what was to be deleted is
        fail(f"{error.filename}: {error.strerror or error}; nothing was deleted")


def _collect(root: Path, older_than: int, dry_run: bool) -> None:
    from specplan.tools.build.keys import object_name

    found = packs_under(root)
    kept: set[Path] = set()
    for directory in found.values():
        try:
            pack = manifest.read(directory)
        except ManifestError as error:
            fail(f"{error}; nothing was deleted")
        kept |= {directory / manifest.NAME}
        kept |= {directory / record.file for _, _, record in pack.libraries()}
        for plan in pack.plans.values():
            for host in plan.objects:
                if host not in HOSTS:
                    fail(f"{directory} is built for host {host}, unknown here; nothing was deleted")
                name = object_name(plan.key, HOSTS[host])
                kept |= {root / "objects" / f"{name}.o", root / "objects" / f"{name}.json"}
    now = time.time()
    size = count = 0
    foreign: list[Path] = []
    refused: list[str] = []
    places = [(directory, _IN_A_PACK) for directory in found.values()]
    for directory, form in (*places, (root / "objects", _IN_OBJECTS)):
        for file, facts in _files(directory, refused):
            if file in kept:
                continue
            if not form.fullmatch(file.name):
                foreign.append(file)
            elif now - facts.st_mtime > older_than:
                try:
                    if not dry_run:
                        file.unlink()
                except FileNotFoundError:
                    continue  # somebody else was faster
                except OSError as error:
                    refused.append(f"{file}: {error.strerror or error}")
                    continue
                count, size = count + 1, size + facts.st_size
    verb = "would delete" if dry_run else "deleted"
    click.echo(f"{verb} {count} files, {size / 1e6:.1f} MB, under {root}")
    if foreign:
        click.echo(f"left alone {len(foreign)} files that no build names so, such as {foreign[0]}")
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        fail(f"not deleted: {refused[0]}{more}")


def _files(directory: Path, refused: list[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """The plain files of a directory, without the lock; no link is followed."""
    if directory.is_symlink() or not directory.is_dir():
        return
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        refused.append(f"{directory}: {error.strerror or error}")
        return
    for path in paths:
        try:
            facts = path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            refused.append(f"{path}: {error.strerror or error}")
            continue
        if stat.S_ISREG(facts.st_mode) and path.name != ".lock":
            yield path, facts
