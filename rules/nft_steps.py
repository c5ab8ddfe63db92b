"""What a transaction of nftables can do, step by step. How each is said is for others: as a command
of libnftables or a line of a script (rules/nft.py), or as bytes (rules/nft_batch.py). Which steps a
plan takes, in which transactions, is told by rules/nft_transactions.py.
"""

from collections.abc import Sequence

from rules.model import Chain, Lookup, Rule
from rules.nft_sets import DropSet, Leave, SetStep
from rules.values import Value


class DropTable(Value):
    """Our table, with all that is in it."""


class MakeTable(Value):
    """Our table; exclusive: it fails where somebody else was faster."""

    exclusive: bool


class MakeChain(Value):
    """One of our chains."""

    chain: Chain


class DropRule(Value):
    """Whosever rule it is."""

    chain: str
    handle: int


class DropStray(Value):
    """A map or set that is not ours; the rules that use it must have gone."""

    kind: str
    name: str


class EraseStray(Value):
    """An element from one of our maps that is not ours."""

    name: str
    ports: tuple[int, int]


class DropMap(Value):
    """With all elements; the rule that looks into it must have gone."""

    lookup: Lookup
    ports: bool = False  # the other one, from port to port


class Erase(Value):
    """Ranges from a map, or their ports from the other."""

    lookup: Lookup
    rules: Sequence[Rule]
    ports: bool = False


class MakeMap(Value):
    """Yet empty."""

    lookup: Lookup
    ports: bool = False


class Fill(Value):
    """A map, with these ranges, or the other with the port that each of their ports leads to."""

    lookup: Lookup
    rules: Sequence[Rule]
    ports: bool = False


class AddRule(Value):
    """To its chain, behind all others, or before them, or right behind the one with that handle."""

    rule: Rule
    first: bool = False
    behind: int = 0


class AddLookup(Value):
    """The rule that looks into a map, behind all others, or before them."""

    lookup: Lookup
    first: bool = False


class MakeBridge(Value):
    """A chain for the time of an edit, that packets meet before ours; or behind it, where ours is
    made anew: whoever finds the old one gone comes to it afterwards."""

    chain: Chain
    behind: bool = False


class FlushBridge(Value):
    """What an edit left in it that did not come to its end."""

    chain: Chain
    behind: bool = False


class AddBridge(Value):
    """A rule that serves packets while the map or chain that is to serve them is being made."""

    rule: Rule
    behind: bool = False


class DropBridge(Value):
    """With all rules."""

    chain: Chain
    behind: bool = False


RuleStep = (
    DropTable
    | MakeTable
    | MakeChain
    | DropRule
    | DropStray
    | EraseStray
    | DropMap
    | Erase
    | MakeMap
    | Fill
    | AddRule
    | AddLookup
)
BridgeStep = MakeBridge | FlushBridge | AddBridge | DropBridge
Step = RuleStep | BridgeStep | SetStep
TAKING = (DropTable, EraseStray, DropMap, Erase, DropSet, Leave)


def takes_away(steps: Sequence[Step], before: Sequence[Step] = ()) -> bool:
    """Whether packets that are on their way through older rules could miss what goes. Rules are not
    missed: a packet meets those of a chain as they were when it came there; unless a bridge takes
    over from them, with the transaction before, that the packet had passed already. Nor is a bridge
    before our chain: who does not meet it any more comes to the map afterwards."""
    bridged = any(isinstance(step, AddBridge) and not step.behind for step in before)
    taking = (*TAKING, DropRule) if bridged else TAKING
    return any(
        isinstance(step, taking) or (isinstance(step, DropBridge) and step.behind) for step in steps
    )
