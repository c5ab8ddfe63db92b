"""The three ways by which rules get into nftables, and what is to be found after each: as the agent
writes them, as libnftables is told them, and as a person would who was shown the plan."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from agent.kernel.kinds import Known, Namespace
from rules.model import Desired, Live, Rule
from rules.nft import commands
from rules.nft_batch import MOST_ECHOED, can_write
from rules.nft_script import script
from rules.nft_steps import AddBridge, AddLookup, AddRule, Step
from rules.nft_transactions import transactions
from rules.plan import diff
from rules.shapes import lives
from tests.spaces import NFTABLES, kernel, nft, observed, within

Three = tuple[str, str, str]  # namespaces
# One expression where nft before 1.1, and the agent, write two that mean the same.
RANGE = re.compile(r"(?m)^( *)\[ range eq (reg \d+) (\w+) (\w+) ]$")


@contextmanager
def entered(netns: str, known: Known | None = None) -> Iterator[Namespace]:
    with kernel(NFTABLES).opened(netns, known) as namespace:
        yield namespace


def listing(netns: str) -> list[str]:
    """As nft tells it, with what the kernel makes of each rule, whatever order they came in: that
    a flow has one number wherever it is counted is not to be seen otherwise."""
    told = RANGE.sub(
        r"\1[ cmp gte \2 \3 ]\n\1[ cmp lte \2 \4 ]",
        within(netns, "nft", "--debug=netlink", "list", "ruleset"),
    ).splitlines()
    nameless = (re.sub(r"__(set|map)\d+", r"__\1", line) for line in told)
    handles, ends = "inet portranger ", "\telement "  # libnftables gives a map an end at 0
    return sorted(line for line in nameless if not line.startswith((handles, ends)))


def assert_as_foreseen(netns: str, namespace: Namespace) -> None:
    """What is known without a look is what another finds who looks."""
    assert namespace.known is not None
    generation, known = namespace.known
    with entered(netns) as another:
        found = another.observe()
        assert generation == another.generation
    assert Counter(map(identity, known.live)) == Counter(map(identity, found.live))
    for key in ("foreign", "chains", "table", "unsound", "mapped", "sets"):
        assert getattr(known, key) == getattr(found, key)
    assert +lives(known).weights == +lives(found).weights


def identity(live: Live) -> tuple[Rule, int]:
    """What tells it from another that would be written in its place."""
    return live.rule, live.handle


def by_bytes(netns: str, desired: Desired) -> None:
    """As the agent does it, and no look is needed to know what there is then."""
    with entered(netns) as namespace:
        plan = diff(netns, desired, namespace.observe())
        namespace.commit(plan)
        if all(map(_is_told, transactions(plan))):
            assert_as_foreseen(netns, namespace)
        else:
            assert namespace.known is None


def _is_told(part: Sequence[Step]) -> bool:
    """Whether handles are told: libnftables tells none, nor does the kernel of very many rules."""
    made = sum(isinstance(step, AddRule | AddLookup | AddBridge) for step in part)
    return can_write(part) and made <= MOST_ECHOED


def by_commands(netns: str, desired: Desired) -> None:
    """As libnftables is told it."""
    for part in transactions(diff(netns, desired, observed(netns))):
        within(netns, "nft", "-j", "-f", "-", stdin=json.dumps({"nftables": commands(part)}))


def by_script(netns: str, desired: Desired) -> None:
    """As a person would do it who was shown the plan."""
    text = script(diff(netns, desired, observed(netns)))
    within(netns, "nft", "-c", "-f", "-", stdin=text)
    nft(netns, text)


def assert_all_alike(three: Three, desired: Desired, holds: Callable[[str], None]) -> None:
    """Whoever writes it, the same is there afterwards, and that which is wanted."""
    by_bytes(three[0], desired)
    by_commands(three[1], desired)
    by_script(three[2], desired)
    for netns in three:
        holds(netns)
    one, two, other = map(listing, three)
    assert one == two == other
