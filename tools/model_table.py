"""``docs/models.md``'s table: what real models reach on each server, and how much is claimed.

``python -m specplan.tools.model_table`` prints it, ``--write docs/models.md`` puts it between the
page's marks. It is made of the catalog's claims and the configs in ``tests/models`` alone, so it
needs no pack.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from specplan.plans import catalog as catalogs
from specplan.plans import deployment as deployments
from specplan.plans import ranges, servers
from specplan.plans.catalog import Catalog
from specplan.plans.deployment import Use, smaller_pages
from specplan.plans.servers import Setup

#: The page's marks, and the config and name of each model.
START, END = "<!-- table: python -m specplan.tools.model_table -->", "<!-- end of table -->"
MODELS = {
    "qwen3.8-flash-next": "Qwen3.8-Flash-Next",
    "qwen3-next-80b": "Qwen3-Next-80B",
    "qwen3.6-27b": "Qwen3.5/3.6-27B",
    "qwen3.5-397b": "Qwen3.5-397B",
}
ARCH, DRAFTS, REQUESTS, RANKS = "sm_90a", 3, 256, (1, 2, 4, 8)
#: The K/V dtype of each server in the table.
KV_DTYPE = "fp8"


def default_configs() -> Path:
    """The configs of a checkout."""
    return Path(__file__).resolve().parent.parent / "tests" / "models"


def table(catalog: Catalog, configs: Path) -> str:
    """The table as Markdown: one row a model, server and tensor parallel size."""
    lines = [
        "| model | server | TP | reached on a rank | certified | holes |",
        "| --- | --- | ---: | --- | ---: | --- |",
    ]
    for name, title in MODELS.items():
        config = servers.read_config(configs / f"{name}.json")
        for server in servers.SERVERS:
            for ranks in RANKS:
                setup = Setup(server, REQUESTS, tp=ranks, kv_dtype=KV_DTYPE, drafts=DRAFTS)
                derived = servers.derive(config, setup)
                wanted = deployments.loads(derived.text, catalog)
                reached = list(deployments.reachable(wanted, catalog))
                held = sum(bool(catalog.claims.get(cell)) for _, cell, _ in reached)
                uses = "; ".join(_spelt(use) for use in wanted.uses)
                share = f"{held}/{len(reached)}"
                holes = "; ".join(_holes(catalog, wanted.uses, wanted.requests)) or "none"
                lines.append(f"| {title} | {server} | {ranks} | {uses} | {share} | {holes} |")
    return "\n".join(lines)


def _spelt(use: Use) -> str:
    """A use in few words: heads, page and dtype."""
    g = use.geometry
    if use.family == "gdn_replay":
        return f"GDN {g['key_heads']}/{g['value_heads']} {use.dtype}"
    if use.family == "sparse_gqa_verify":
        return f"QSA {g['q_heads']}/{g['kv_heads']} page {g['page_size']} {use.dtype}"
    return use.family


def _holes(catalog: Catalog, uses: Sequence[Use], requests: Sequence[int]) -> Iterator[str]:
    """What is missing of each use: the problem, or the batch sizes."""
    for use in uses:
        short = _spelt(use).split(" ", 1)[0]
        if not use.problems:
            page = use.geometry.get("page_size")
            what = "no such heads" if page is None else f"no page {page}"
            sizes = " or ".join(str(size) for size, _ in smaller_pages(use, ARCH, catalog))
            yield f"{short}: {what}" + (f", fits a view to {sizes}" if sizes else "")
            continue
        one = deployments.Deployment((ARCH,), tuple(requests), (DRAFTS + 1,), (use,))
        missing = [
            cell.requests
            for _, cell, _ in deployments.reachable(one, catalog)
            if not catalog.claims.get(cell)
        ]
        if missing:
            spelt = ranges.spell(missing)
            many = f"{len(missing)} batch sizes from {missing[0]}"
            yield f"{short}: {f'batches of {spelt}' if len(spelt) <= 24 else many}"


def written(page: str, body: str) -> str:
    """The page with its table replaced."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page lacks {START!r} or {END!r}")
    return f"{before}{START}\n\n{body}\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--configs", type=Path, default=default_configs(), metavar="DIR")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put it into this page")
    given = parser.parse_args(arguments)
    body = table(catalogs.load(), given.configs)
    if given.write is None:
        print(body)
    else:
        page = given.write.read_text(encoding="utf-8")
        given.write.write_text(written(page, body), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
