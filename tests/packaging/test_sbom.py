"""The bill of materials says what the locks say, and every licence in it was looked at."""

from __future__ import annotations

import json
from typing import Any

import pytest

from release.components import components
from release.licences import BEGIN, END, here, not_accepted, renewed, rows
from release.locks import canonical, everything
from release.sbom import SYSTEM, bill
from tests.spaces import ROOT

Json = Any

PARTS = ("build", "runtime", "iptables")


@pytest.fixture(scope="module")
def document() -> Json:
    return json.loads(bill([here()], PARTS, 1_700_000_000))


def test_it_lists_what_is_locked_with_all_hashes(document: Json) -> None:
    listed = {
        (one["name"], one["version"]): {
            digest["content"]
            for reference in one["externalReferences"]
            for digest in reference["hashes"]
        }
        for one in document["components"]
        if "version" in one
    }
    assert listed == {
        (canonical(one.name), one.version): set(one.hashes) for one in everything(*PARTS)
    }


def test_it_lists_what_is_loaded_from_the_machine_without_a_version(document: Json) -> None:
    without = {one["name"] for one in document["components"] if "version" not in one}
    assert without == set(SYSTEM)
    assert {"libnftables1", "libxtables12"} <= without


def test_every_part_is_named_once_and_has_a_place_in_the_graph(document: Json) -> None:
    known = [one["bom-ref"] for one in document["components"]]
    assert len(known) == len(set(known))
    graph = {one["ref"]: one["dependsOn"] for one in document["dependencies"]}
    assert graph.keys() == {*known, "portranger"}
    assert {name for needs in graph.values() for name in needs} <= set(known)
    assert {"click", "pip-nftables", "python-iptables", "python3"} <= set(graph["portranger"])
    assert graph["pip-nftables"] == ["libnftables1"]


def test_it_is_the_same_whenever_it_is_written(document: Json) -> None:
    assert json.loads(bill([here()], PARTS, 1_700_000_000)) == document
    later = json.loads(bill([here()], PARTS, 1_800_000_000))
    assert later["serialNumber"] != document["serialNumber"]


def test_every_licence_was_looked_at() -> None:
    assert {name: licence for name, licence, _ in rows() if not_accepted(licence)} == {}


@pytest.mark.parametrize("licence", ["unknown", "AGPL-3.0-only", "MIT AND Proprietary"])
def test_a_licence_that_nobody_looked_at_is_noticed(licence: str) -> None:
    assert not_accepted(licence)


def test_an_environment_that_is_not_what_is_locked_has_no_bill(tmp_path: Any) -> None:
    with pytest.raises(SystemExit, match="is locked as"):
        components([str(tmp_path)], ["runtime"])


def test_the_table_of_licences_is_that_of_today() -> None:
    """`make sbom` writes it."""
    page = (ROOT / "docs/supply-chain.md").read_text()
    assert BEGIN in page
    assert END in page
    assert renewed(page) == page
