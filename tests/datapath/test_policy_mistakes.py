"""What nobody can understand closes and never opens: with packets, policies that are wrong from the
start, that turn wrong, that are written twice, or that cannot be read when the daemon starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.datapath.policing import (
    ALL4,
    ALL6,
    CLOSED,
    FIRST,
    LABELS,
    MACHINE,
    PHONE,
    POLICY,
    STRANGER,
    Question,
    Town,
    machine,
    policed,
    policy,
    served,
    wired,
    written,
)
from tests.datapath.publishing import TCP, UDP
from tests.nodes import Net
from tests.spaces import eventually

IN: tuple[Question, ...] = (("in", STRANGER, TCP, 80), ("in", MACHINE, UDP, 53))
OUT: tuple[Question, ...] = (("out", STRANGER, TCP, 80), ("out", MACHINE, UDP, 53))
GOOD = policy(f"{PHONE}, ingress: [{{from: [{ALL4}, {ALL6}], ports: [{{port: 80}}]}}]")
OPEN: Question = ("in", STRANGER, TCP, 80)
SHUT: tuple[Question, ...] = (("in", STRANGER, TCP, 443), ("in", MACHINE, TCP, 80))

# Each would allow everything but for one mistake: the policy, its problem, what stays open.
BOTH_WAYS = f"{PHONE}, policyTypes: [Ingress, Egress], ingress: [{{}}], egress: [{{}}"
MISTAKES = {
    "an operator that there is not, of peers": (
        policy(
            f"{PHONE}, ingress: [{{}}, {{from: [{{podSelector: {{matchExpressions:"
            " [{key: role, operator: Like, values: [web]}]}}]}]"
        ),
        "spec.ingress[1].from[0].podSelector.matchExpressions[0].operator",
        OUT,
    ),
    "an operator that there is not, of whom it selects": (
        policy(
            "podSelector: {matchExpressions: [{key: app, operator: Like, values: [radio]}]},"
            " ingress: [{}]"
        ),
        "spec.podSelector.matchExpressions[0].operator",
        OUT[:1],  # whom it selects is not known, so it is everybody
    ),
    "an end below the start": (
        policy(f"{PHONE}, ingress: [{{}}, {{ports: [{{port: 90, endPort: 80}}]}}]"),
        "spec.ingress[1].ports[0].endPort",
        OUT,
    ),
    "an end of a name": (
        policy(
            f"{PHONE}, policyTypes: [Egress],"
            " egress: [{}, {ports: [{port: http, endPort: 90}]}]"
        ),
        "spec.egress[1].ports[0].endPort",
        IN,
    ),
    "an end without a start": (
        policy(f"{BOTH_WAYS}, {{ports: [{{endPort: 90}}]}}]"),
        "spec.egress[1].ports[0].endPort",
        (),
    ),
    "a protocol that there is not": (
        policy(f"{PHONE}, ingress: [{{}}, {{ports: [{{protocol: ICMP}}]}}]"),
        "spec.ingress[1].ports[0].protocol",
        OUT,
    ),
    "an exception outside": (
        policy(
            f"{PHONE}, ingress: [{{}}, {{from:"
            " [{ipBlock: {cidr: 10.0.0.0/8, except: [11.0.0.0/8]}}]}]"
        ),
        "spec.ingress[1].from[0].ipBlock.except[0]",
        OUT,
    ),
    "a peer that is nobody": (
        policy(f"{PHONE}, ingress: [{{}}, {{from: [{{}}]}}]"),
        "spec.ingress[1].from[0]",
        OUT,
    ),
    "a word that is not known": (
        policy(f"{PHONE}, ingress: [{{}}], ingres: [{{}}]"),
        "spec.ingres",
        (),
    ),
    "a type that there is not": (
        policy(f"{PHONE}, policyTypes: [ingress], ingress: [{{}}]"),
        "spec.policyTypes[0]",
        (),
    ),
    "a version that is not known": (
        policy(f"{PHONE}, ingress: [{{}}]").replace("networking.k8s.io/v1", "networking.k8s.io/v9"),
        "apiVersion",
        (),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("town")
    with wired() as lab, served(lab), policed(folder / "node", lab) as made:
        yield made


@pytest.fixture
def lab() -> Iterator[Net]:
    """Another one, for daemons that come and go."""
    with wired() as made, served(made):
        yield made


@pytest.fixture
def town(shared: Town) -> Iterator[Town]:
    """With the files that it had, whatever the test before did."""
    yield shared
    shared.node.save("vm1.yaml", machine(shared.first, FIRST, LABELS))
    for path in shared.node.manifests.iterdir():
        if path.name not in ("vm1.yaml", "vm2.yaml", "everybody.yaml"):
            path.unlink()
    shared.settle()


def told(town: Town, file: str, place: str = "") -> bool:
    """Whether a problem there comes to be in the status, and in the log."""

    def known() -> bool:
        found = town.daemon.status()["problems"]
        return any(file in one["file"] and place in ("", one["field"]) for one in found)

    said = [one["problem"] for one in town.daemon.said("bad manifest")] if eventually(known) else []
    return any(file in one and place in one for one in said)


# --------------------------------------------------------------------------- wrong from the start


@pytest.mark.parametrize("name", MISTAKES)
def test_a_policy_that_was_never_good_closes_what_it_selects(town: Town, name: str) -> None:
    text, place, left = MISTAKES[name]
    file = f"{list(MISTAKES).index(name)}.yaml"  # of which nothing good is remembered
    town.assert_open(*IN, *OUT)
    town.node.save(file, text)
    selected = town.lab.vms if place.startswith("spec.podSelector") else [town.first]
    assert eventually(lambda: all(town.fences(vm) for vm in selected))
    town.assert_open(*left, shut=[one for one in (*IN, *OUT) if one not in left])
    assert told(town, file, place)


def test_a_wrong_policy_does_not_open_what_a_good_one_closes(town: Town) -> None:
    town.save(CLOSED)
    town.node.save("wrong.yaml", MISTAKES["an end below the start"][0].replace("web", "more"))
    assert told(town, "wrong.yaml")
    town.assert_open(shut=[*IN, *OUT])


def test_a_wrong_policy_closes_although_a_good_one_allows(town: Town) -> None:
    """Policies add up: what the wrong one would have allowed is not known, what another one does
    is."""
    town.node.save("wrong.yaml", MISTAKES["an end below the start"][0].replace("web", "more"))
    assert told(town, "wrong.yaml")
    town.node.save(POLICY, GOOD)
    assert eventually(lambda: "ip tcp 80" in town.granted())
    town.assert_open(OPEN, shut=SHUT)


def test_a_policy_that_is_written_twice_opens_nothing(town: Town) -> None:
    town.node.save("a.yaml", GOOD)
    town.settle()
    town.node.save("b.yaml", policy(f"{PHONE}, ingress: [{{}}]"))
    assert told(town, "b.yaml")
    town.assert_open(OPEN, shut=SHUT)


def test_a_policy_that_is_written_twice_from_the_start_opens_nothing(
    lab: Net, tmp_path: Path
) -> None:
    node = written(tmp_path / "node", lab)
    node.save("a.yaml", GOOD)
    node.save("b.yaml", policy(f"{PHONE}, ingress: [{{}}]"))
    with node.running() as daemon:
        town = Town(lab, node, daemon)
        town.assert_open(shut=[OPEN, *SHUT])
        node.remove("b.yaml")
        town.settle()
        town.assert_open(OPEN, shut=SHUT)


def test_a_list_where_a_word_should_be_does_not_stop_the_daemon(lab: Net, tmp_path: Path) -> None:
    node = written(tmp_path / "node", lab)
    with node.running() as daemon:
        text = f"{PHONE}, ingress: [{{}}, {{ports: [{{protocol: [TCP]}}]}}]"
        town = Town(lab, node, daemon)
        town.changed(lambda: node.save(POLICY, policy(text)), town.first)
        assert daemon.says("bad manifest")
        town.assert_open(*OUT, shut=IN)
        assert daemon.alive, daemon.log.read_text()


def test_labels_that_nobody_can_read_open_nothing(town: Town) -> None:
    """A namespace whose manifest is wrong is not one without labels."""
    chosen = "{namespaceSelector: {matchExpressions: [{key: bad, operator: DoesNotExist}]}}"
    asked: Question = ("in", "lost", TCP, 80)
    town.save(policy(f"{PHONE}, ingress: [{{from: [{chosen}]}}]"))
    town.assert_open(asked)
    text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: nowhere, labels: {bad: 1}}\n"
    town.changed(lambda: town.node.save("nowhere.yaml", text), town.first)
    assert told(town, "nowhere.yaml", "metadata.labels.bad")
    town.assert_open(shut=[asked])


# ------------------------------------------------------------------------------------ turns wrong


@pytest.mark.parametrize("wrong", [*MISTAKES, "no YAML", "empty", "no file"])
def test_a_policy_that_turns_bad_means_what_it_meant(town: Town, wrong: str) -> None:
    town.save(GOOD)
    before = town.granted()
    texts = {"no YAML": "{", "empty": "", **{name: one[0] for name, one in MISTAKES.items()}}
    if wrong == "no file":
        (town.node.folder / "link").symlink_to("/nowhere")
        (town.node.folder / "link").replace(town.node.manifests / POLICY)
    else:
        town.node.save(POLICY, texts[wrong])
    assert told(town, POLICY)
    assert [Path(one).name for one in town.daemon.status()["last_good"]] == [POLICY]
    town.assert_open(OPEN, shut=SHUT)
    assert town.granted() == before


def test_a_machine_beside_a_policy_that_turns_bad_keeps_both(town: Town) -> None:
    """What is in one file holds as a whole or not at all."""
    own = machine(town.first, FIRST, LABELS)
    town.save(own + GOOD, "vm1.yaml")
    wider = machine(town.first, (), LABELS)
    town.node.save("vm1.yaml", wider + MISTAKES["an end below the start"][0])
    assert told(town, "vm1.yaml")
    town.assert_open(OPEN, shut=SHUT)


# ---------------------------------------------------------------------------- and the daemon ends


def test_what_is_enforced_outlives_the_daemon_and_what_it_cannot_read(
    lab: Net, tmp_path: Path
) -> None:
    node = written(tmp_path / "node", lab)
    away = tmp_path / "away"
    with node.running() as daemon:
        town = Town(lab, node, daemon)
        town.save(GOOD)
        town.assert_open(OPEN, shut=SHUT)
        node.save(POLICY, MISTAKES["an end below the start"][0])
        assert told(town, POLICY)
    town.assert_open(OPEN, shut=SHUT)  # nobody is there

    with node.running() as daemon:  # the file is still bad
        town = Town(lab, node, daemon)
        assert told(town, POLICY)
        town.assert_open(OPEN, shut=SHUT)
    before = town.granted()

    node.manifests.rename(away)
    for state in ("kept", "lost"):
        if state == "lost":
            shutil.rmtree(node.state)
        unread = node.start()
        try:
            assert unread.says("source away"), unread.log.read_text()
            town = Town(lab, node, unread)
            town.assert_open(OPEN, shut=SHUT)
            assert town.granted() == before, state
        finally:
            unread.kill()

    away.rename(node.manifests)
    with node.running() as daemon:  # nothing is remembered: the bad policy was never good
        town = Town(lab, node, daemon)
        town.assert_open(shut=[OPEN, *SHUT])
        node.save(POLICY, GOOD)
        town.settle()
        town.assert_open(OPEN, shut=SHUT)


def test_the_first_rules_of_a_run_are_those_of_the_policies(lab: Net, tmp_path: Path) -> None:
    """Where a machine and its policy are new, there is no moment in between: all is in one
    transaction."""
    node = written(tmp_path / "node", lab)
    node.save(POLICY, CLOSED)
    with node.running() as daemon:
        done = daemon.said("applied", netns=lab.vms[0].pod)
        assert len(done) == 1, done
        Town(lab, node, daemon).assert_open(shut=[*IN, *OUT])
