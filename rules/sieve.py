"""What is due to be forgotten, so arranged that a flow is held against few of it. A node that
publishes thousands of ports has as many due, and hundreds of thousands of flows."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate

from rules.model import NUMBERS, OWN, Address, Family, Protocol
from rules.ports import HIGHEST
from rules.stale import KNOWN, Displaced, Due, Flow, Forbidden, Forgotten
from rules.values import Value, replace

# Family and number (None: of protocols without ports), who answers, and where it was sent.
_Way = tuple[Family, int | None, Address | None, Address | None]
_Span = tuple[int, int, Forgotten]  # from the first port to the last


class Sieve:
    """For a namespace with these addresses of its own."""

    def __init__(self, due: Iterable[Due], own: Set[Address]) -> None:
        self._own = own
        self._of_guest: dict[Address | None, list[Due]] = {}
        spans: dict[_Way, list[_Span]] = {}
        for one in due:
            if isinstance(one, Forgotten):
                spans.setdefault(_way(one), []).extend(_spans(one))
            else:
                self._of_guest.setdefault(one.guest, []).append(one)
        self._at = {way: _Spans(some) for way, some in spans.items()}

    def holding(self, flow: Flow) -> list[Due]:
        """All for which the flow is to be forgotten."""
        return [one for one in self._near(flow) if one.holds(flow, self._own)]

    def _near(self, flow: Flow) -> Iterator[Due]:
        for way in self._ways(flow):
            if way in self._at:
                yield from self._at[way].with_port(flow.port)
        for end in {flow.answerer, flow.sender}:
            yield from self._of_guest.get(end, ())

    def _ways(self, flow: Flow) -> Iterator[_Way]:
        """Under which there may be something that holds the flow."""
        places = [None, flow.destination]
        if flow.destination in self._own:
            places.append(OWN[flow.family])
        for protocol in [flow.protocol] if flow.protocol in KNOWN else [flow.protocol, None]:
            for place in places:
                yield flow.family, protocol, None, place
                yield flow.family, protocol, flow.answerer, place


class _Spans:
    """Ranges of ports, of which some may overlap, each with what is due there."""

    def __init__(self, spans: Iterable[_Span]) -> None:
        self._spans = sorted(spans, key=lambda span: span[0])
        self._firsts = [first for first, _, _ in self._spans]
        # The last port of each and of all before it: who looks back further finds no more.
        self._reach = list(accumulate((last for _, last, _ in self._spans), max))

    def with_port(self, port: int) -> Iterator[Forgotten]:
        place = bisect_right(self._firsts, port) - 1
        while place >= 0 and self._reach[place] >= port:
            _, last, one = self._spans[place]
            if last >= port:
                yield one
            place -= 1


def _way(one: Forgotten) -> _Way:
    number = None if one.protocol is None else NUMBERS[one.protocol]
    return one.family, number, None if one.endpoints else one.answerer, one.destination


def _spans(one: Forgotten) -> list[_Span]:
    if one.protocol is None:
        return [(0, HIGHEST, one)]
    return [(ports.first, ports.last, one) for ports in one.ports]


class Signs(Value, kw_only=True):
    """What a flow must have one of, or it need not be looked at more closely."""

    addresses: frozenset[Address] = frozenset()  # of whoever is at an end
    ports: Mapping[int, Sequence[int]]  # by the number of a protocol: a 1 for each that counts
    untranslated: bool = False  # where that is enough
    none: bool = False  # where any flow may be meant


def signs_of(due: Iterable[Due]) -> Signs:
    """Few guests are in a namespace, and a node publishes few of all ports; so guests are known by
    their addresses, and what is published by its ports."""
    addresses: set[Address] = set()
    ports: dict[int, bytearray] = {}
    untranslated = none = False
    for one in due:
        if not isinstance(one, Forgotten):
            addresses.add(one.guest)
        elif one.destination is None and not one.endpoints:
            if one.answerer is None:
                untranslated = True
            else:
                addresses.add(one.answerer)
        elif one.protocol is None:
            none = True
        else:
            counts = ports.setdefault(NUMBERS[one.protocol], bytearray(HIGHEST + 1))
            for some in one.ports:
                counts[some.first : some.last + 1] = b"\1" * len(some)
    return Signs(addresses=frozenset(addresses), ports=ports, untranslated=untranslated, none=none)


class Question(Value, kw_only=True):
    """What the kernel can be asked for instead of all flows: those of a family with that address at
    one end, and of one protocol."""

    family: Family
    answers: bool  # whether the address is that of who answers
    sends: bool = False  # else: whether it is that of who sends, or the one that it was sent to
    address: Address
    protocol: int | None = None  # None: of any

    def holds(self, flow: Flow) -> bool:
        if flow.family is not self.family or self.protocol not in (None, flow.protocol):
            return False
        if self.answers:
            return flow.answerer == self.address
        return (flow.sender if self.sends else flow.destination) == self.address


def questions_of(due: Iterable[Due], own: Set[Address]) -> tuple[Question, ...] | None:
    """What to ask for, so that nothing is missed that is due in a namespace with these addresses;
    None: for everything."""
    found: dict[Question, set[int | None]] = {}
    for one in due:
        bare = list(_ends(one, own))
        if not bare and isinstance(one, Forgotten) and one.endpoints:
            return None
        protocol = _number(one)
        for question in bare:
            found.setdefault(question, set()).add(protocol)
    return tuple(
        replace(question, protocol=protocols.pop()) if len(protocols) == 1 else question
        for question, protocols in found.items()
    )


def _number(one: Due) -> int | None:
    """The only protocol that it is about."""
    if isinstance(one, Forgotten):
        return None if one.protocol is None else NUMBERS[one.protocol]
    return NUMBERS[Protocol.UDP] if isinstance(one, Displaced) else None


def _ends(one: Due, own: Set[Address]) -> Iterator[Question]:
    """At which end the flows have which address; one of these is enough."""
    if not isinstance(one, Forgotten):
        incoming = isinstance(one, Forbidden) and one.incoming
        yield Question(family=one.family, answers=incoming, sends=not incoming, address=one.guest)
    elif one.answerer is not None and not one.endpoints:
        yield Question(family=one.family, answers=True, address=one.answerer)
    elif one.destination not in (None, OWN[one.family]):
        yield Question(family=one.family, answers=False, address=one.destination)
    elif one.destination is not None or not one.endpoints:
        # What was not translated is answered by where it was sent.
        for address in sorted(own, key=str):
            if Family.of(address) is one.family:
                yield Question(family=one.family, answers=not one.endpoints, address=address)
