"""Flows as conntrack knows them, and values that tell which of them are to be forgotten. What is
due after a change is decided in rules/flows.py."""

from collections.abc import Iterable, Sequence, Set

from rules.model import FORWARDED, NUMBERS, OWN, Address, Family, Network, Protocol
from rules.policies import holder
from rules.ports import PortRange, coalesce, have
from rules.values import Value, replace

KNOWN = frozenset(NUMBERS[protocol] for protocol in FORWARDED)

Whom = tuple[Network, ...] | None  # in order and apart; None: everybody


class Flow(Value, kw_only=True):
    """A tracked flow: where its first packet was going, and who answers it."""

    family: Family
    protocol: int  # its number: other protocols than ours are tracked, too
    port: int
    destination: Address
    answerer: Address
    sender: Address | None = None
    answering_port: int = 0  # where it was translated to
    sending_port: int = 0
    answered_port: int = 0  # where the answers go: another one, where that was taken


class Led(Value, kw_only=True):
    """Flows that some rule leads to a machine."""

    ports: tuple[PortRange, ...]  # in order and apart
    to: Address
    shift: int = 0  # how far the port that answers is behind the one it was sent to
    at: Address | None = None  # where they were sent, or any of its own; None: anywhere

    def holds(self, flow: Flow, own: Set[Address]) -> bool:
        return (
            flow.answerer == self.to
            and flow.answering_port - flow.port == self.shift
            and have(self.ports, flow.port, flow.port)
            and _is_sent_to(self.at, flow, own)
        )


def _is_sent_to(at: Address | None, flow: Flow, own: Set[Address]) -> bool:
    """Whether a flow was sent to that address, which may stand for any of the namespace's own."""
    if at == OWN[flow.family]:
        return flow.destination in own
    return at in (None, flow.destination)


class Forgotten(Value, kw_only=True):
    """Flows to these ports that one machine answers; where that is None, flows to an address of the
    namespace itself that were not translated. With a destination, only those that were sent there;
    with endpoints, those that anybody else answers. None that is spared."""

    family: Family
    protocol: Protocol | None  # None: of those that have no ports
    ports: tuple[PortRange, ...]  # in order and apart
    answerer: Address | None
    destination: Address | None = None  # or any of its own
    endpoints: frozenset[Address] = frozenset()
    shut: tuple[PortRange, ...] = ()  # of these, for UDP: those that nobody has now
    spared: tuple[Led, ...] = ()  # that another rule leads there, or one that came later

    def shuts(self, flow: Flow) -> bool:
        """Whether nobody has the port of such a flow now, but its guest could go on with it: of UDP
        nobody can tell an answer from a beginning."""
        return have(self.shut, flow.port, flow.port)

    def holds(self, flow: Flow, own: Set[Address]) -> bool:
        """Whether the flow is one of them, in a namespace with these addresses of its own."""
        if flow.family is not self.family or not _is_sent_to(self.destination, flow, own):
            return False
        if not (self._is_misled(flow) if self.endpoints else self._is_answered(flow, own)):
            return False
        if any(one.holds(flow, own) for one in self.spared):
            return False
        if self.protocol is None:
            return flow.protocol not in KNOWN
        return flow.protocol == NUMBERS[self.protocol] and have(self.ports, flow.port, flow.port)

    def _is_answered(self, flow: Flow, own: Set[Address]) -> bool:
        if self.answerer is None:  # what the guest sends out to others has such ports, too
            return flow.destination in own and flow.answerer == flow.destination
        # Where both are the same nobody translated it: it was sent to the guest itself.
        return flow.answerer == self.answerer != flow.destination

    def _is_misled(self, flow: Flow) -> bool:
        """Where the node itself answers, TCP was its own before, but UDP goes on for ever."""
        own = flow.answerer == flow.destination and self.protocol is not Protocol.UDP
        return flow.answerer not in self.endpoints and not own


class Displaced(Value, kw_only=True):
    """Flows that a guest began from these UDP ports while somebody else had them, so that it is
    seen at another. They would keep those who sent to its ports before from being heard as such."""

    family: Family
    guest: Address
    ports: tuple[PortRange, ...]  # in order and apart

    def holds(self, flow: Flow, own: Set[Address]) -> bool:  # noqa: ARG002 - as the others
        return (
            flow.sender == self.guest
            and flow.protocol == NUMBERS[Protocol.UDP]
            and flow.sending_port != flow.answered_port
            and have(self.ports, flow.sending_port, flow.sending_port)
        )


class Forbidden(Value, kw_only=True):
    """Flows of a machine, in one direction, that no rule would let begin now."""

    family: Family
    guest: Address
    incoming: bool
    # With whom, and which ports, in order and apart; None: all of them.
    allowed: tuple[tuple[Whom, Protocol | None, tuple[PortRange, ...] | None], ...]

    def holds(self, flow: Flow, own: Set[Address]) -> bool:
        """Whether the flow is one of them; what programs of the namespace itself send the guest is
        nobody's to forbid."""
        if flow.family is not self.family or flow.sender is None:
            return False
        if self.incoming:
            if flow.answerer != self.guest or flow.sender in own:
                return False
            peer, port = flow.sender, flow.answering_port
        else:
            if flow.sender != self.guest or flow.answerer in own:
                return False
            peer, port = flow.destination, flow.port
        return not any(
            (protocol is None or flow.protocol == NUMBERS[protocol])
            and (ports is None or have(ports, port, port))
            and (who is None or holder(who, peer) is not None)
            for who, protocol, ports in self.allowed
        )


Due = Forgotten | Forbidden | Displaced


def merged(due: Iterable[Due]) -> tuple[Due, ...]:
    """The same flows in fewer values; of what policies forbid a guest, only the latest counts."""
    alike: dict[Due, list[Forgotten | Displaced]] = {}
    latest: dict[object, Forbidden] = {}
    for one in due:
        if isinstance(one, Forbidden):
            latest[one.family, one.guest, one.incoming] = one
        else:
            bare = {"shut": ()} if isinstance(one, Forgotten) else {}
            alike.setdefault(replace(one, ports=(), **bare), []).append(one)
    return (*(_joined(some) for some in alike.values()), *latest.values())


def _joined(some: Sequence[Forgotten | Displaced]) -> Forgotten | Displaced:
    if len(some) == 1:
        return some[0]
    shut = coalesce(one for each in some if isinstance(each, Forgotten) for one in each.shut)
    more = {"shut": shut} if isinstance(some[0], Forgotten) else {}
    return replace(some[0], ports=coalesce(one for each in some for one in each.ports), **more)
