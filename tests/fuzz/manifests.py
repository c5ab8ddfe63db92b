"""Whatever somebody writes into a manifest is answered with problems that say where and what to do,
or it is served: planned, written in every form, and read back as it was meant."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

from agent.commands.common import intents
from agent.commands.convert import convert
from agent.commands.explain import explain
from agent.console import Console
from agent.errors import Failure, Usage
from agent.sources.files import Snapshot, load
from rules.conflicts import conflicts
from rules.desired import desire
from rules.fences import fenced
from rules.manifests import read
from rules.manifests.metadata import (
    ADDRESS,
    GUEST,
    INTERFACE,
    NETNS,
    PORT_END,
    PORT_RANGES,
    is_elsewhere,
)
from rules.model import Desired, Family, Observed, Rule, is_link_name
from rules.nft_batch import batch, can_write
from rules.nft_script import script as nft_script
from rules.plan import Plan, diff
from rules.problems import Problem
from rules.render import plan_json, plan_text, summary
from rules.xtables import script as iptables_script
from rules.xtables import steps as iptables_steps
from tests.fuzz.choices import TEXTS, Choices, edited, mutated, scalar
from tests.fuzz.samples import ANNOTATED, DECLARED, EVERYTHING, MACHINE, shown_to_people
from tests.fuzz.target import Target, simple
from tests.property.strategies import ListedTable
from tests.unit.samples import BRIDGE, ETH0, LO, encode, space, steps

WHOLE_FILE = ("unreadable", "not-text", "too-large")  # of no line
AROUND = space(LO, ETH0, BRIDGE)
MOST = 2000  # ports and ranges of an interface: thousands take long to write, not to get wrong
QUOTED = re.compile(r'"[^"\\]*"')
COMMENT = re.compile(  # what a script of several transactions says, in which nobody's name stands
    r"# (\d+ transactions, so that no new connection is refused meanwhile: give each"
    r"|to nft by itself, a tenth of a second after the one before|transaction \d+ of \d+)"
)
SPELLINGS = ("ranges", "ports", "annotations")
ANNOTATIONS = (PORT_RANGES, NETNS, INTERFACE, GUEST, ADDRESS, f"{PORT_END}ssh")
FIRST, LAST = 0x20, 0x7E  # of what a script may consist of


# ------------------------------------------------------------------------------------- in words


def is_told(problem: Problem, *, file: str = "<stdin>") -> None:
    """A problem says all that its author needs, on one line."""
    words = str(problem)
    assert words.isprintable(), words
    assert problem.file == file, words
    assert problem.line > 0 or problem.code in WHOLE_FILE, words
    assert all((problem.code, problem.what, problem.fix)), words
    assert len(words) < 20_000, words[:200]
    json.dumps(plan_json([], [problem])).encode()


def is_safe(script: str) -> None:
    """No name in a script can end the line, the quotes or the braces that it stands in."""
    for line in script.splitlines():
        assert all(FIRST <= ord(letter) <= LAST for letter in line), line
        if COMMENT.fullmatch(line):
            continue
        assert not {'"', "'", "\\", "`", "$", "#"} & {*QUOTED.sub("", line)}, line


def is_shown(plan: Plan) -> None:
    """A plan can be read by people and by programs."""
    json.dumps(plan_json([plan], []), allow_nan=False).encode()
    lines = [*plan_text(plan), summary([plan])]
    assert all(line.isprintable() for line in lines), lines
    "\n".join(lines).encode()
    for rule in (*plan.add, *(new for _, new in plan.change)):
        assert len(rule.owner.encode()) <= 128, rule.owner


def is_written_for_nft(plan: Plan) -> None:
    """A plan can be carried out by nftables, in each of three ways."""
    is_shown(plan)
    is_safe(nft_script(plan))
    json.dumps(encode(plan), allow_nan=False).encode()
    found = list(steps(plan))
    if can_write(found):
        batch(found)


def is_written_for_iptables(plan: Plan) -> None:
    """The same by iptables, in both."""
    is_shown(plan)
    is_safe(iptables_script(plan))
    if not any(rule.peers for rule in plan.add):  # a script can do without sets
        json.dumps([iptables_steps(plan, family) for family in Family])


def is_written(plan: Plan) -> None:
    """A plan for a namespace that nobody looked at can be carried out by both."""
    is_written_for_nft(plan)
    is_written_for_iptables(plan)


def is_served(snapshot: Snapshot) -> None:
    """What was accepted is planned for, written in every form, and leaves nothing to do."""
    if conflicts(snapshot.machines):
        return
    try:
        found, failures = intents(snapshot, None)
    except Failure:
        return
    assert not failures, failures
    for intent in found:
        is_written(intent.plan)
    for machine in fenced(snapshot.machines, snapshot.laws, {}):
        desired = desire([machine], AROUND)
        is_written(diff(machine.netns, desired, Observed(mapped={})))
        is_converging(desired)


def is_converging(desired: Desired) -> None:
    """Once it is done, nothing is left to do."""
    table = ListedTable()
    table.run(encode(diff("blue", desired, Observed(mapped={}))))
    assert diff("blue", desired, table.observed()).same_rules


def text(data: bytes) -> None:
    """A file of anything, as `validate` and `plan` read it."""
    snapshot = load(["-"], lambda: data, most=MOST)
    for problem in snapshot.problems:
        is_told(problem)
    for line in snapshot.skipped:
        assert line.isprintable(), line
    if not snapshot.problems:
        is_served(snapshot)


# ------------------------------------------------------------------------------------ as a tree


def tree(data: bytes) -> None:
    """An object near a good one, from root and from a tenant."""
    choices = Choices(data)
    document = mutated(choices.pick([*DECLARED, EVERYTHING]), choices)
    for tenant in (False, True):
        reading = read(document, limit=MOST, tenant=tenant)
        for problem in reading.problems:
            is_told(problem.at("x", 1), file="x")
        for machine in reading.machines if tenant else ():
            assert not machine.addresses, machine
            assert machine.netns == machine.name, machine
    written = json.dumps(document)
    text(written.encode(errors="surrogatepass"))


# ------------------------------------------------------------------------------------ spellings


def means_the_same_however_spelt(content: bytes) -> None:
    """A good manifest is written in every spelling, and each is read as it was meant."""
    before = load(["-"], lambda: content, most=MOST)
    for to in SPELLINGS:
        out, err = io.StringIO(), io.StringIO()
        try:
            code = convert(["-"], Console(out, err, lambda: content), to=to)
        except Failure:
            continue
        assert err.getvalue().replace("\n", "").isprintable(), err.getvalue()
        assert not code or before.problems, err.getvalue()
        if not before.problems:
            again = load(["-"], out.getvalue().encode)
            assert not again.problems, (to, [*map(str, again.problems)])
            assert _rules(again) == _rules(before), to


def _rules(snapshot: Snapshot) -> dict[str, frozenset[Rule]]:
    """What each machine would get."""
    return {str(one): desire([one], AROUND).rules for one in snapshot.machines}


def spelling(data: bytes) -> None:
    """An object near a good one."""
    choices = Choices(data)
    document = mutated(choices.pick([*DECLARED, EVERYTHING]), choices, 3)
    means_the_same_however_spelt(json.dumps(document).encode())


def annotation(data: bytes) -> None:
    """An annotation of anything: it is told what is wrong with it, or it is taken as it is."""
    choices = Choices(data)
    sample: dict[str, Any] = json.loads(json.dumps(choices.pick([ANNOTATED, MACHINE])))
    spec = sample["spec"].get("template", sample)
    annotations: dict[str, Any] = spec["metadata"]["annotations"]
    for _ in range(1 + choices.below(2)):
        key = choices.pick(ANNOTATIONS)
        start = str(annotations.get(key, choices.pick(TEXTS)))
        annotations[key] = edited(start, choices) if choices.below(3) else scalar(choices)
    reading = read(sample)
    for problem in reading.problems:
        is_told(problem.at("x", 1), file="x")
    if not reading.problems:
        [machine] = reading.machines
        assert not re.search(r"\s|(^|/)\.\.(/|$)", machine.netns), machine.netns
        assert machine.netns.isprintable(), machine.netns
        assert machine.masquerade is None or is_link_name(machine.masquerade.entry or "eth0")
        assert not any(map(is_elsewhere, machine.addresses)), machine.addresses
    content = json.dumps(sample).encode()
    text(content)
    means_the_same_however_spelt(content)


# -------------------------------------------------------------------------------------- explain

EXPLAINED = json.dumps(EVERYTHING).encode()


def question(data: bytes) -> None:
    """What `explain` is asked: answered, or told how to ask."""
    choices = Choices(data)
    what = f"{choices.pick((*TEXTS, 'tcp', 'udp'))}/{choices.pick((*TEXTS, '22', '1000'))}"
    what = edited(what, choices) if choices.below(2) else choices.pick(("tcp/22", "UDP/1000"))
    source = choices.pick((None, *TEXTS))
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err, lambda: EXPLAINED)
    words = ""
    try:
        explain(what, console, paths=["-"], source=source)
    except Usage as usage:
        words = str(usage)
    for line in (words, *out.getvalue().splitlines()):
        assert line.isprintable(), line


# --------------------------------------------------------------------------------------- targets

YAML = """
--- ... ? : - [ { | > & * ! % @ %YAML !!binary !x <<: &a *a {<<:*a} [*a,*a] 1_000 0o17 1e999 0b1
ports: port: end: start: protocol: name: portRanges: kind: apiVersion: metadata: annotations: spec:
interfaces: networks: masquerade: items: labels: pod: nodePort: targetPort: endPort: cidr: except:
"""
WORDS = (
    *(word.encode(errors="surrogatepass") for word in (*TEXTS, *YAML.split(), "\t", "\n", "\n  ")),
    *(
        b"\xff",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\xef\xbf\xbe",
        b"&a [*a]",
        b"&a {b: *a}",
    ),
)


def texts() -> Iterator[bytes]:
    yield from shown_to_people()
    yield from (json.dumps(one, indent=1).encode() for one in DECLARED)
    yield b"a: &a [x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\nd: {<<: *c}\n"


TARGETS = (
    Target(name="manifest-texts", opened=simple(text), seeds=texts, words=WORDS),
    Target(name="manifest-trees", opened=simple(tree), examples=200),
    Target(name="spellings", opened=simple(spelling), examples=80),
    Target(name="annotations", opened=simple(annotation), examples=120),
    Target(name="explain", opened=simple(question)),
)
