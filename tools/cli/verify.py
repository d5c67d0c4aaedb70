"""``specplan verify``: check the bytes of packs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from specplan.plans import certificates, device_code, evidence, manifest
from specplan.plans.certificates import CertificateError
from specplan.plans.manifest import Manifest, ManifestError, packs_under
from specplan.tools.cli.common import (
    argument_packs,
    evidence_directories,
    fail,
    named_packs,
    option_certificates,
    option_packs,
    pack_root,
)


@click.command("verify")
@argument_packs()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@option_packs()
@option_certificates()
def verify_command(
    path: Path | None, as_json: bool, packs: Path | None, certificate_path: Path | None
) -> None:
    """Check the bytes and the marks of a pack, or of all packs of a directory.

    Manifest digest, arch, sizes, sha256, that the device code inside is what the manifest names,
    and that exactly those cells are marked certified that a certificate covers.
    """
    root = pack_root(named_packs(path, packs))
    found = packs_under(root)
    results: dict[str, list[str]] = {}
    marks: dict[str, list[str]] = {}
    for arch, directory in found.items():
        marks[arch] = []
        try:
            pack = manifest.read(directory)
        except ManifestError as error:
            results[arch] = [str(error)]
            continue
        other = manifest.wrong_arch(pack, directory, arch)
        results[arch] = [other] if other is not None else _wrong_bytes(pack, directory)
        if results[arch]:
            continue  # no marks mend that
        try:
            places = evidence_directories(certificate_path)
            local = evidence.local_directory(directory)
            known = certificates.read_all([*places, local], pack.arch)
            marks[arch] = evidence.mark_complaints(evidence.compare(pack, known), directory)
        except CertificateError as error:
            marks[arch] = [str(error)]
    if as_json:
        both = {arch: [*wrong, *marks[arch]] for arch, wrong in results.items()}
        click.echo(json.dumps({"packs": str(root), "archs": both}, indent=1))
    else:
        for arch, wrong in results.items():
            state = "corrupt" if wrong else "wrongly marked" if marks[arch] else "whole"
            click.echo(f"{arch}: {state} ({found[arch]})")
            for complaint in (*wrong, *marks[arch]):
                click.echo(f"  {complaint}", err=True)
    if not found:
        fail(f"no pack under {root}")
    sys.exit(1 if any(results.values()) or any(marks.values()) else 0)


def _wrong_bytes(pack: Manifest, directory: Path) -> list[str]:
    """What is wrong with the shared objects of a pack."""
    wrong = [f"no library of {family} for host {host}" for host, family in pack.lacking()]
    for _, family, record in pack.libraries():
        complaint = manifest.check_object(directory, record)
        if complaint is not None:
            wrong.append(complaint)
            continue
        data = (directory / record.file).read_bytes()
        inside = {device_code.read(image).sha256 for image in device_code.images(data)}
        named = {p.device_code for p in pack.plans.values() if p.family == family}
        if inside != named:
            wrong.append(
                f"{record.file} holds other device code than its manifest names "
                f"({len(named - inside)} missing, {len(inside - named)} unknown)"
            )
    return wrong
