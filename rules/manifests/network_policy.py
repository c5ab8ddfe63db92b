"""A NetworkPolicy becomes whom it selects and what it allows. Where anything in it cannot be
understood it still selects, and allows nothing: it was written to close, and a mistake in it must
not open what it was to close."""

from rules.manifests import metadata
from rules.manifests.fields import Fields
from rules.manifests.named_ports import TRANSPORTS, number_or_name
from rules.manifests.networks import cidr
from rules.manifests.policy_size import (
    BLOCK,
    NAMESPACES,
    PEER_KEYS,
    PEERS_KEY,
    PODS,
    says_more_than,
    selects_by_more_than,
)
from rules.manifests.ports import known_protocol, number
from rules.manifests.selectors import read_selector
from rules.model import Protocol
from rules.policies import (
    Direction,
    IpBlock,
    Network,
    NetworkPolicy,
    Peers,
    PolicyPort,
    PolicyRule,
    Selector,
    is_strictly_inside,
)
from rules.ports import HIGHEST, PortRange

KEYS = ("apiVersion", "kind", "metadata", "spec", "status")
SPEC_KEYS = ("podSelector", "policyTypes", "ingress", "egress")
BLOCK_KEYS = ("cidr", "except")
PORT_KEYS = ("protocol", "port", "endPort")
TYPES = {one.value.capitalize(): one for one in Direction}
VERSION = "networking.k8s.io/v1"
_CIDR_FIX = "Write a network in quotes, such as '192.0.2.0/24', '192.0.2.7/32' or '2001:db8::/32'."


def read_policy(document: Fields, *, limit: int) -> NetworkPolicy | None:
    """The policy of a manifest; broken where the document has a problem, and None where it is not
    known which namespace it is for."""
    _check_version(document)
    document.only(KEYS)
    if not document.given("spec"):
        document.missing("spec", "the policy's specification")
    spec = document.mapping("spec")
    spec.only(SPEC_KEYS)
    clear = not document.found
    namespace, name = metadata.identity(document.mapping("metadata"))
    types = _types(spec, clear=clear)
    selector = _selector(spec, limit)
    rules: dict[Direction, tuple[PolicyRule, ...]] = dict.fromkeys(Direction, ())
    if _check_size(spec, limit):
        rules = {direction: _rules(spec, direction) for direction in Direction}
    broken = bool(document.found)
    if broken:
        if not _is_placed(document):
            return None
        rules = dict.fromkeys(Direction, ())
    return NetworkPolicy(
        namespace=namespace,
        name=name if metadata.is_subdomain(name) else metadata.UNNAMED,
        selector=selector,
        ingress=rules[Direction.INGRESS] if Direction.INGRESS in types else None,
        egress=rules[Direction.EGRESS] if Direction.EGRESS in types else None,
        broken=broken,
    )


def _check_version(document: Fields) -> None:
    """Note a version that we do not know, or none: it may say more than we can read."""
    if not document.given("apiVersion"):
        document.missing("apiVersion", VERSION)
    elif document.values["apiVersion"] != VERSION:
        document.problem(
            "api-version",
            "is not a version of NetworkPolicy that can be read",
            f"Write {VERSION}.",
            at=("apiVersion",),
            value=document.values["apiVersion"],
        )


def _is_placed(document: Fields) -> bool:
    """Whether it is known which namespace a policy is for."""
    written = document.values.get("metadata")
    if not isinstance(written, dict):
        return written is None
    namespace = written.get("namespace")
    return namespace is None or (isinstance(namespace, str) and metadata.is_label(namespace))


def _types(spec: Fields, *, clear: bool) -> frozenset[Direction]:
    """The directions that a policy speaks of; where that is not clear, both."""
    before = len(spec.found)
    written = spec.sequence("policyTypes")
    if len(written) > len(TYPES):
        spec.problem(
            "bad-choice",
            f"has {len(written)} entries, and there are only two types",
            "Write [Ingress], [Egress] or [Ingress, Egress].",
            at=("policyTypes",),
        )
    for index, value in enumerate(written):
        if not isinstance(value, str) or value not in TYPES:
            meant = value.strip().capitalize() if isinstance(value, str) else ""
            spec.problem(
                "bad-choice",
                "must be exactly Ingress or Egress",
                f"Write {meant}." if meant in TYPES else "Write Ingress or Egress.",
                at=("policyTypes", index),
                value=value,
            )
    if len(spec.found) > before:
        return frozenset(Direction)
    if written:
        return frozenset(TYPES[str(value)] for value in written)
    speaks = not clear or spec.values.get("egress") not in (None, [])
    return frozenset(Direction) if speaks else frozenset({Direction.INGRESS})


def _selector(spec: Fields, limit: int) -> Selector:
    """Whom it selects; where that is not known, everybody."""
    if selects_by_more_than(limit, spec.values):
        return Selector()
    before = len(spec.found)
    selector = read_selector(spec, PODS)
    return Selector() if len(spec.found) > before else selector


def _check_size(spec: Fields, limit: int) -> bool:
    """Whether it is not more than can be meant; else it is noted."""
    if not says_more_than(limit, spec.values):
        return True
    spec.problem(
        "too-many-ranges",
        f"has more than {limit} rules, peers, exceptions, ports and labels, which is the limit",
        "Write neighbouring ports as ranges, and neighbouring networks as one.",
    )
    return False


def _rules(spec: Fields, direction: Direction) -> tuple[PolicyRule, ...]:
    made: list[PolicyRule] = []
    for fields in spec.mappings(direction.value):
        key = PEERS_KEY[direction]
        fields.only((key, "ports"))
        peers = [_peer(peer) for peer in fields.mappings(key)]
        made.append(
            PolicyRule(
                peers=tuple(peer for peer in peers if peer) or None,
                ports=_ports(fields) or None,
            )
        )
    return tuple(made)


# ----------------------------------------------------------------------------------------- peers


def _peer(fields: Fields) -> IpBlock | Peers | None:
    fields.only(PEER_KEYS)
    given = [key for key in PEER_KEYS if fields.given(key)]
    if not given:
        fields.problem(
            "empty-peer",
            "names nobody",
            "Add ipBlock, podSelector or namespaceSelector; podSelector: {} is all of the "
            "namespace, and without the whole list it is everybody.",
        )
    if BLOCK in given and len(given) > 1:
        fields.problem(
            "block-and-selector",
            f"is written beside {given[1]}, and a peer is either addresses or labels",
            "Make two entries of the list of it.",
            at=(BLOCK,),
        )
    written = fields.mapping(BLOCK)
    block = _block(written) if isinstance(fields.values.get(BLOCK), dict) else None
    pods = read_selector(fields, PODS)
    namespaces = read_selector(fields, NAMESPACES)
    if not given or BLOCK in given:
        return block
    return Peers(pods=pods, namespaces=namespaces if NAMESPACES in given else None)


def _block(fields: Fields) -> IpBlock | None:
    fields.only(BLOCK_KEYS)
    if not fields.given("cidr"):
        fields.missing("cidr", "a network")
        whole = None
    else:
        whole = _network(fields, ("cidr",), fields.values["cidr"])
    read = [
        (index, _network(fields, ("except", index), value))
        for index, value in enumerate(fields.sequence("except"))
    ]
    holes: list[Network] = []
    for index, hole in read:
        if not whole or not hole:
            continue
        if is_strictly_inside(hole, whole):
            holes.append(hole)
        else:
            fields.problem(
                "except-outside",
                f"is not a part of {whole}, smaller than all of it",
                "Write a network inside the cidr, or remove it.",
                at=("except", index),
                value=str(hole),
            )
    return IpBlock(whole, tuple(holes)) if whole else None


def _network(fields: Fields, at: tuple[str | int, ...], value: object) -> Network | None:
    """A network; bits behind its prefix count for nothing, as in Kubernetes."""
    network = cidr(value) if isinstance(value, str) else None
    if network is None:
        what = "is not a network address with its prefix length"
    elif network.version == 6 and network.network_address.ipv4_mapped:
        what = "is an IPv4 network written as an IPv6 one, which programs read differently"
    else:
        return network
    fields.problem("bad-cidr", what, _CIDR_FIX, at=at, value=value)
    return None


# ----------------------------------------------------------------------------------------- ports


def _ports(fields: Fields) -> tuple[PolicyPort, ...]:
    read = [_port(port) for port in fields.mappings("ports")]
    return tuple(port for port in read if port)


def _port(fields: Fields) -> PolicyPort | None:
    fields.only(PORT_KEYS)
    protocol = _protocol(fields)
    first = number_or_name(fields, "port") if fields.given("port") else None
    last = number(fields, "endPort") if fields.given("endPort") else None
    if fields.given("endPort"):
        _check_end(fields, first, last)
    if protocol is None:
        return None
    if isinstance(first, str) or not fields.given("port"):
        return PolicyPort(protocol, first if isinstance(first, str) else None)
    if first is None or (last is not None and last < first):
        return None
    return PolicyPort(protocol, PortRange(first, last or first))


def _protocol(fields: Fields) -> Protocol | None:
    """The protocol; TCP where none is given. An empty text is none of them, here."""
    text = fields.values.get("protocol")
    return Protocol.TCP if text is None else known_protocol(fields, text, TRANSPORTS)


def _check_end(fields: Fields, first: int | str | None, last: int | None) -> None:
    """Note an end of what has no beginning, or begins behind it."""
    if not fields.given("port"):
        code, what = "end-needs-port", "is the end of a range, and port, its start, is missing"
        fix = f"Add port: with a number up to {last or HIGHEST}, or remove endPort."
    elif type(fields.values["port"]) is str:
        code, what = "end-on-name", "is the end of a range, and its port is a name"
        fix = "Write the number of the port, or remove endPort."
    elif isinstance(first, int) and last is not None and last < first:
        code, what = "end-before-start", f"is below port, which is {first}"
        fix = f"Write a number from {first} to {HIGHEST}, or exchange the two."
    else:
        return
    fields.problem(code, what, fix, at=("endPort",), value=fields.values["endPort"])
