"""What fuzzing found, each as small as it can be said. What forged netlink answers did is in
test_forged_answers.py."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from agent.kernel.counters import counted, elements
from agent.kernel.netlink import HEADER, NLMSG_ERROR, attribute, messages, taken
from agent.kernel.rtnetlink import addresses_of
from agent.sources import slices
from agent.sources.files import load
from agent.sources.parties import Alike, pod, trimmed_pod
from agent.sources.slices import NAME
from agent.sources.store import NODE_PORTS, Store, digest
from rules.manifests import read
from rules.manifests.fields import MOST_PROBLEMS
from rules.model import Chain, Family
from rules.nft_listing import decode
from rules.nft_script import script
from rules.plan import Table, diff
from rules.policies import Selector
from rules.render import plan_text
from rules.xtables_rules import decode_rule
from tests.fuzz.kernel import WANTED
from tests.fuzz.samples import ANNOTATED, POD, POLICY, SLICE

HOSTILE = "x; flush ruleset; #"


def kept(folder: Path, content: object) -> tuple[Store, list[str]]:
    """A store whose node ports are these, under a seal that fits."""
    sealed = {"format": 1, "sha256": digest(content), "content": content}
    (folder / NODE_PORTS).write_text(json.dumps(sealed))
    warnings: list[str] = []
    return Store(str(folder), warnings.append), warnings


@pytest.mark.parametrize(
    "entry",
    [
        [{}, "rtp", "udp", 30000, 30001],
        ["a", [], "udp", 30000, 30001],
        ["a", "rtp", {}, 30000, 30001],
        ["a", "rtp", "udp", True, 30001],
        ["a", "rtp", "udp", 30000.0, 30001],
        ["a", "rtp", "udp", "30000", 30001],
        "abcde",
        5,
    ],
)
def test_node_ports_of_the_wrong_type_are_set_aside(tmp_path: Path, entry: Any) -> None:
    store, warnings = kept(tmp_path, [["b", "sip", "udp", 30005, 30005], entry])
    assert store.node_ports() == []
    assert [word for word in warnings if NODE_PORTS in word]
    assert not (tmp_path / NODE_PORTS).exists()


def test_a_record_of_half_a_character_is_set_aside(tmp_path: Path) -> None:
    warnings: list[str] = []
    store = Store(str(tmp_path), warnings.append)
    store.keep("a", "text")
    (path,) = (tmp_path / "last-good").iterdir()
    content = {"file": "\ud800", "text": "text"}
    path.write_text(json.dumps({"format": 1, "sha256": digest(content), "content": content}))
    assert Store(str(tmp_path), warnings.append).load() == {}
    assert len(warnings) == 1


def test_a_name_with_half_a_character_is_kept(tmp_path: Path) -> None:
    Store(str(tmp_path), print).keep("\ud800", "text")
    assert Store(str(tmp_path), print).load() == {"\ud800": "text"}


def listing(chain: object) -> list[dict[str, Any]]:
    ours = {"family": "inet", "table": "portranger"}
    return [{"rule": {**ours, "chain": chain, "handle": 7, "expr": [{"counter": None}]}}]


@pytest.mark.parametrize("chain", [HOSTILE, "x\ny", "", "{", None, 5, ["x"]])
def test_a_rule_in_a_chain_that_nft_cannot_name_makes_the_table_anew(chain: object) -> None:
    plan = diff("blue", WANTED, decode(listing(chain)))
    assert plan.table is Table.REMAKE
    assert "delete rule" not in script(plan)


def test_what_is_not_ours_is_named_without_its_control_characters() -> None:
    entries = [*listing("x"), {"\x1b[31m": {"name": "\x1b[31m"}}]
    assert all(line.isprintable() for line in plan_text(diff("blue", WANTED, decode(entries))))
    foreign = decode_rule(Family.IP, Chain.OUTPUT, 0, {"\x1b[31m": ""})
    assert str(foreign).isprintable()


def test_as_many_duplicates_as_there_may_be_are_told_in_few_words() -> None:
    text = "\n---\n".join([json.dumps(ANNOTATED)] * 2000)
    problems = load(["-"], text.encode).problems
    assert [problem.code for problem in problems] == ["duplicate-machine"] * 2000
    assert sum(len(str(problem)) for problem in problems) < 2000 * 500
    assert "and 1996 more" in problems[0].what


def test_of_more_problems_than_anybody_reads_the_rest_is_not_told() -> None:
    machine = json.loads(json.dumps(ANNOTATED))
    machine["spec"]["networks"] = [1] * (2 * MOST_PROBLEMS)
    problems = read(machine).problems
    assert len(problems) == MOST_PROBLEMS + 1
    assert str(problems[-1]) == (
        f"has {2 * MOST_PROBLEMS + 1} problems, of which {MOST_PROBLEMS} are told. "
        "Correct those first. [too-many-problems]"
    )
    assert {problem.code for problem in problems[:-1]} == {"not-a-mapping"}


def test_a_policy_with_too_many_problems_still_closes_in_both_directions() -> None:
    policy = json.loads(json.dumps(POLICY))
    policy["spec"] |= {f"unknown{number}": 1 for number in range(MOST_PROBLEMS + 5)}
    policy["spec"] |= {"policyTypes": ["Sideways"], "podSelector": {"matchLabels": {"app": [1]}}}
    (read_as,) = read(policy).policies
    assert read_as.broken
    assert (read_as.selector, read_as.ingress, read_as.egress) == (Selector(), (), ())


@pytest.mark.parametrize("odd", [{}, [], [{}], 5, None, True])
def test_what_an_api_server_never_says_of_pods_and_slices_is_passed_over(odd: object) -> None:
    status = {**POD["status"], "podIP": odd}
    held = trimmed_pod({**POD, "status": status}, Alike())
    assert pod(held) == pod(trimmed_pod(POD, Alike()))
    labels = {NAME: odd}
    there = slices.trimmed({**SLICE, "metadata": {**SLICE["metadata"], "labels": labels}})
    assert slices.heard(there, "node", {"phone"}) is None


@pytest.mark.parametrize("length", [0, 3, 15, 17, 1 << 31])
def test_a_message_that_lies_about_its_length_is_an_error(length: int) -> None:
    with pytest.raises(OSError, match="message"):
        list(messages(HEADER.pack(length, 20, 0, 1, 0)))


@pytest.mark.parametrize("body", [b"", b"\0\0", b"\xff"])
def test_an_error_without_its_number_is_an_error(body: bytes) -> None:
    whole = HEADER.pack(HEADER.size + len(body), NLMSG_ERROR, 0, 1, 0) + body
    with pytest.raises(OSError, match="message"):
        taken(whole, struct.Struct("=BBH"))


def test_what_is_half_told_is_passed_over() -> None:
    halves = [b"", b"\1", b"\0\0\0", attribute(1, b"\5\0\1")]
    for half in halves:
        assert list(counted([((1, 0, 0), {4: half, 3: b""})])) == []
        assert list(elements("map", [((1, 0, 0), {3: half})])) == []
        assert list(addresses_of([((2, 24, 0, 0, 1), {2: half})])) == []
    assert list(addresses_of([((2, 33, 0, 0, 1), {2: bytes(4)})])) == []
