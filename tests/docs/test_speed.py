"""The README's table of speed says what was measured."""

from __future__ import annotations

import json

from bench.headline import README, ROWS, renewed, table
from bench.report import FOLDER, RESULTS


def test_the_table_is_that_of_the_results_on_file() -> None:
    text = README.read_text()
    results = json.loads((FOLDER / RESULTS).read_text())
    assert renewed(text, results) == text
    assert f"| `{ROWS[0][1]}` |" in text


def test_a_row_has_the_number_its_bound_and_the_command() -> None:
    figures = {"of nft -f": {"value": 0.4689, "unit": "x", "at most": 1.5}}
    made = list(table({"sections": {"control-many": {"figures": figures}}}))
    assert made[2:] == [
        "| 5,000 ranges from nothing | of nft -f | 0.469 x | at most 1.5 x | `control-many` |"
    ]
