"""Whole cases on file: a manifest, a namespace as it is, and the plan in every form.

UPDATE_GOLDEN=1 writes what comes out today into the folders; read the difference before keeping it.
observed.json has the namespace's links, default route, settings, and our table as libnftables lists
it (null: there is none); the listings are real ones.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent.sources.files import load
from rules.conflicts import conflicts
from rules.desired import desire
from rules.model import Desired, Observed, Surroundings
from rules.nft_listing import decode
from rules.plan import Plan, diff
from rules.render import plan_json, plan_text, summary
from rules.values import replace
from tests.property.strategies import ListedTable
from tests.unit.samples import encode, link, space

HERE = Path(__file__).parent
CASES = sorted(path.parent.name for path in HERE.glob("*/manifest.yaml"))


def seen(case: str) -> tuple[Surroundings, Observed, list[Any]]:
    """The namespace of a case: what is around, what it holds, and the listing of that."""
    given = json.loads((HERE / case / "observed.json").read_text())
    links = [link(one["name"], *one["addresses"]) for one in given["links"]]
    listing = (given["listing"] or {"nftables": []})["nftables"]
    observed = replace(decode(listing), sysctls=given["sysctls"])
    return space(*links, default=given["default_link"]), observed, listing


def planned(case: str) -> tuple[Desired, Plan]:
    snapshot = load([str(HERE / case / "manifest.yaml")], bytes)
    assert not snapshot.problems
    assert not conflicts(snapshot.machines)
    (netns,) = {machine.netns for machine in snapshot.machines}
    around, observed, _ = seen(case)
    desired = desire(snapshot.machines, around)
    return desired, diff(netns, desired, observed)


def written(desired: Desired, plan: Plan) -> dict[str, str]:
    """The plan in the forms that are on file."""
    pending = [f"pending: {one.owner}: {one.reason}" for one in desired.pending]
    return {
        "plan.txt": "\n".join([*plan_text(plan), summary([plan]), *pending, ""]),
        "plan.json": json.dumps(plan_json([plan], []), indent=2) + "\n",
        "nft.json": a_line_each(encode(plan)),
    }


def a_line_each(commands: list[dict[str, object]]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(one)}" for one in commands) + "\n]\n"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["plan.txt", "plan.json", "nft.json"])
def test_the_plan_is_as_it_is_on_file(case: str, name: str) -> None:
    text = written(*planned(case))[name]
    path = HERE / case / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("case", CASES)
def test_the_commands_on_file_leave_nothing_to_plan(case: str) -> None:
    desired, _ = planned(case)
    table = ListedTable()
    table.entries = [entry for entry in seen(case)[2] if "metainfo" not in entry]
    table.handle = 1000
    table.run(json.loads((HERE / case / "nft.json").read_text()))
    assert diff("", desired, table.observed()).same_rules


def test_every_folder_is_a_case() -> None:
    folders = {path.name for path in HERE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert folders == set(CASES)
    assert len(CASES) >= 12
