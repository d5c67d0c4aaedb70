"""``specplan mark``: renew the marks of built packs from the certificates at hand."""

from __future__ import annotations

from pathlib import Path

import click
from specplan.plans import evidence, manifest
from specplan.plans.certificates import CertificateError
from specplan.plans.manifest import ManifestError
from specplan.tools.cli.common import (
    argument_packs,
    evidence_directories,
    fail,
    named_packs,
    option_certificates,
    option_packs,
    pack_root,
)


@click.command("mark")
@argument_packs()
@option_packs()
@option_certificates()
def mark_command(path: Path | None, packs: Path | None, certificate_path: Path | None) -> None:
    """Mark the cells of built packs certified where a certificate covers their bits, and no others.

    Needs neither the compiler nor a GPU. Certificates are those that specplan ships and those
    beside each pack; one that lies elsewhere (--certificates) is copied beside the pack, where the
    runtime finds it.
    """
    from specplan.tools.marking import renew

    root = pack_root(named_packs(path, packs))
    found = manifest.packs_under(root)
    if not found:
        fail(f"no pack under {root}")
    for arch, directory in found.items():
        try:
            before = manifest.read(directory)
            other = manifest.wrong_arch(before, directory, arch)
            if other is not None:
                fail(other)
            after = renew(
                directory,
                evidence_directories(certificate_path),
                lambda text: click.echo(text, err=True),
            )
        except (ManifestError, CertificateError) as error:
            fail(str(error))
        except OSError as error:
            fail(f"{error.filename or directory}: {error.strerror or error}")
        cells = sum(group.certified for _, group in after.cells())
        marks = evidence.differences(before, after)
        click.echo(
            f"{arch}: {cells} cells certified, {len(marks.behind)} of them newly marked, "
            f"{len(marks.ahead)} marks taken away ({directory})"
        )
