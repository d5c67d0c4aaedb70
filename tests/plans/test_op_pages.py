"""The argument tables of ``docs/ops`` are those that the ops declare."""

from __future__ import annotations

import pytest
from specplan.plans.families import SIGNATURES
from specplan.tools import op_pages


@pytest.mark.parametrize("family", SIGNATURES)
def test_a_page_has_the_tables_of_its_ops_and_names_every_parameter(family: str) -> None:
    text = (op_pages.default_directory() / f"{family}.md").read_text(encoding="utf-8")
    assert op_pages.renewed(text, family) == text, "python -m specplan.tools.op_pages --write"
    for op in SIGNATURES[family].values():
        assert all(f"| `{parameter.name}` |" in text for parameter in op.parameters)


def test_an_edited_table_is_renewed_and_the_prose_stays() -> None:
    text = (op_pages.default_directory() / "scatter.md").read_text(encoding="utf-8")
    edited = text.replace("accepted lengths, used raw", "something else")
    assert edited != text
    assert op_pages.renewed(edited, "scatter") == text


@pytest.mark.parametrize("times", [0, 2])
def test_marks_that_are_not_there_once_are_an_error(times: int) -> None:
    page = "# gather\n" + "<!-- arguments of gather -->\n<!-- end of arguments -->\n" * times
    with pytest.raises(ValueError, match="needs '<!-- arguments of gather -->'"):
        op_pages.renewed(page, "gather")


def test_a_tensor_of_several_forms_shows_the_dtypes_of_all() -> None:
    row = next(
        line
        for line in SIGNATURES["sparse_gqa_verify"]["sparse_gqa_verify"].table().splitlines()
        if line.startswith("| `k_cache` |")
    )
    assert "bf16 or fp8_e4m3 or uint8" in row
