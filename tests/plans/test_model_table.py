"""The page on models: its table is what the command makes of the catalog."""

from __future__ import annotations

from pathlib import Path

import pytest
from specplan.plans import catalog as catalogs
from specplan.tools import model_table

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "models.md"


@pytest.fixture(scope="module")
def table() -> str:
    return model_table.table(catalogs.load(), model_table.default_configs())


def test_the_page_has_the_table_that_the_command_makes(table: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert model_table.written(page, table) == page, (
        "the catalog's claims changed; python -m specplan.tools.model_table --write docs/models.md"
    )


def test_every_model_server_and_size_has_a_row_whose_counts_are_right(table: str) -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    keys = [(title, server, int(ranks)) for title, server, ranks, *_ in rows[2:]]
    assert keys == [
        (title, server, ranks)
        for title in model_table.MODELS.values()
        for server in ("vllm", "sglang", "trtllm")
        for ranks in (1, 2, 4, 8)
    ]
    for row in rows[2:]:
        held, reached = map(int, row[4].split("/"))
        assert 0 <= held <= reached > 0
        assert (row[5] == "none") == (held == reached), row


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks"):
        model_table.written("no marks", "")
