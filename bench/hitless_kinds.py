"""The kinds of change that the hitless suite makes: each is a round of states, told as manifests,
and the ports that every one of these states declares."""

from collections.abc import Iterable, Sequence

from bench.hitless_net import FROM4, FROM6, NODE4, NODE6, SOURCES, Net
from rules.shapes import MANY
from rules.values import Value

WIDE = 20  # ports of a range
LABELS = 'app: phone, always: "yes"'
RETIRED = 'app: retired, always: "yes"'
FIRST = ', first: "yes"'
SHIFTED = 13000
SERVED = 200  # ports of the Service that changes


class Kind(Value, kw_only=True):
    """A kind of change: from each state to the next, and from the last to the first."""

    name: str
    states: tuple[str, ...]
    flows: tuple[str, ...]  # to ports that are declared in every state
    to: tuple[str, str]  # the addresses they are opened to
    leaves: bool = False  # the second VM leaves its Service: what is under way to it may be cut
    tampered: str = ""  # the namespace whose table somebody spoils, so that it is made anew
    killed: bool = False  # the daemon is killed while it makes the change


def kinds(net: Net) -> list[Kind]:
    """All of them, in the order in which they are run."""
    return [*_ranges(net), *_services(net), *_policies(net), *_tampering(net), _kill(net)]


# ------------------------------------------------------------------------------------------ ranges

Ports = tuple[int, int]


def _spans(count: int, start: int = 1000) -> list[Ports]:
    return [(first, first + WIDE - 1) for first in range(start, start + 100 * count, 100)]


def _flows(spans: Iterable[Ports], shift: int = 0) -> tuple[str, ...]:
    """Of both protocols."""
    more = f"{shift:+d}" if shift else ""
    return tuple(
        f"{protocol}:{first}-{last}{more}" for first, last in spans for protocol in ("tcp", "udp")
    )


def _ranges(net: Net) -> list[Kind]:
    few, many = _spans(3), _spans(50)
    kept = {count: _spans(count) for count in (4, 5, 7, 8)}
    found = []
    for spans, of in ((few, "3"), (many, "50")):
        *others, (first, last) = spans
        edits = {
            f"one of {of} ranges comes and goes": ([spans, others], others),
            f"one of {of} grows and shrinks": (
                [spans, [*others, (first, last + 20)], [*others, (first - 20, last)]],
                # Half of the flows to the one that changes, which is the one that can lose them.
                [*others, *[(first, last)] * len(others)],
            ),
            f"one of {of} moves": (
                [spans, [*others, (first + 8, last + 8)]],
                [*others, *[(first + 8, last)] * len(others)],
            ),
        }
        found += [_vm_kind(net, name, states, flows) for name, (states, flows) in edits.items()]
    for name, counts in {
        "7 ranges become 8 and back": (7, 8, 7, 4),
        "5 ranges become 4 and back": (5, 4, 5, 8),
        "8 ranges become 4 and back": (8, 4),
    }.items():
        states = [kept[count] for count in counts]
        found.append(_vm_kind(net, name, states, kept[4]))
    return found


def _vm_kind(
    net: Net, name: str, states: Sequence[Sequence[Ports]], flows: Sequence[Ports]
) -> Kind:
    return Kind(
        name=name,
        states=tuple(_vm(net, 1, spans) for spans in states),
        flows=_flows(flows),
        to=net.pod_address(1),
    )


def _vm(net: Net, vm: int, spans: Iterable[Ports], labels: str = LABELS) -> str:
    ranges = ",".join(
        f"{first}-{last}/{protocol}" for first, last in spans for protocol in ("tcp", "udp")
    )
    return f"""\
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: vm{vm}, annotations: {{portranger.io/netns: {net.pods[vm - 1]}}}}}
spec:
  template:
    metadata:
      labels: {{{labels}}}
      annotations: {{portranger.io/port-ranges: "{ranges}"}}
    spec:
      domain: {{devices: {{interfaces: [{{name: red, masquerade: {{}}}}]}}}}
      networks: [{{name: red, pod: {{}}}}]
---
"""


# ---------------------------------------------------------------------------------------- Services


def _services(net: Net) -> list[Kind]:
    found = []
    for shift, shifted in ((0, ""), (SHIFTED, ", shifted")):
        for affinity, kept in ((False, ""), (True, ", affinity")):
            for others, beside in ((0, ""), (MANY, ", beside others")):
                both, text, flows = _published(net, shift, affinity=affinity, others=others)
                retired = _vm(net, 2, both, RETIRED)
                found.append(
                    Kind(
                        name=f"an endpoint leaves and joins{shifted}{kept}{beside}",
                        states=(text + _vm(net, 2, both), text + retired),
                        flows=flows,
                        to=(NODE4, NODE6),
                        leaves=True,
                    )
                )
    both, text, flows = _published(net, SHIFTED)
    found.append(
        Kind(
            name="a VM of two is removed and comes back",
            states=(text + _vm(net, 2, both), text),
            flows=flows,
            to=(NODE4, NODE6),
            leaves=True,
        )
    )
    return found


def _published(
    net: Net, shift: int, *, affinity: bool = False, others: int = 1, served: int = SERVED
) -> tuple[list[Ports], str, tuple[str, ...]]:
    """What the VMs have, the Services and the first VM, and the flows. Of the other Services that
    many have one endpoint and as many have two, as the first has in turn."""
    nodes = [(30000, 29999 + served), *_spans(2 * others, 30000 + served)]
    targets = [(first - shift, last - shift) for first, last in nodes]
    selectors = ["app: phone"] + ['always: "yes"', 'first: "yes"'] * others
    text = "".join(
        _service(f"s{number}", selectors[number], span, target, affinity=affinity)
        for number, (span, target) in enumerate(zip(nodes, targets, strict=True))
    )
    return targets, text + _vm(net, 1, targets, LABELS + FIRST), _flows(nodes, -shift)


def _service(name: str, selector: str, span: Ports, target: Ports, *, affinity: bool) -> str:
    ends = "".join(
        f'    portrange.alpha.kubernetes.io/port-end-{protocol}: "{target[1]}"\n'
        for protocol in ("tcp", "udp")
    )
    ports = "".join(
        f"    - {{name: {protocol}, protocol: {protocol.upper()}, port: {target[0]},"
        f" nodePort: {span[0]}}}\n"
        for protocol in ("tcp", "udp")
    )
    sticky = "  sessionAffinity: ClientIP\n" if affinity else ""
    return (
        f"apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\n  annotations:\n{ends}"
        f"spec:\n  type: NodePort\n  selector: {{{selector}}}\n{sticky}  ports:\n{ports}---\n"
    )


# ---------------------------------------------------------------------------------------- policies


def _policies(net: Net) -> list[Kind]:
    spans = _spans(3)
    machine = _vm(net, 1, spans)
    clients = _pods("client", FROM4, FROM6, SOURCES)
    more = _pods("guest", "203.0.113.64", "2001:db8:7::40", 3)
    whole = machine + clients + _policy(spans)
    narrow = [*spans[:2], (spans[2][0], spans[2][1] - 5)]
    return [
        Kind(
            name="peers of a policy join and leave",
            states=(whole, whole + more),
            flows=_flows(spans),
            to=net.pod_address(1),
        ),
        Kind(
            name="ports of a policy are edited",
            states=(whole, machine + clients + _policy(narrow)),
            flows=_flows(narrow),
            to=net.pod_address(1),
        ),
        Kind(
            name="a second policy comes and goes",
            states=(whole, whole + _policy(spans[:1], "more")),
            flows=_flows(spans),
            to=net.pod_address(1),
        ),
    ]


def _pods(name: str, first4: str, first6: str, count: int) -> str:
    stem4, _, low4 = first4.rpartition(".")
    stem6, _, low6 = first6.rpartition(":")
    return "".join(
        f"apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}{number}, labels: {{role: client}}}}\n"
        "spec: {containers: [{name: main}]}\n"
        f"status: {{podIPs: [{{ip: {stem4}.{int(low4) + number}}},"
        f" {{ip: '{stem6}:{int(low6, 16) + number:x}'}}]}}\n---\n"
        for number in range(count)
    )


def _policy(spans: Sequence[Ports], name: str = "web") -> str:
    ports = ", ".join(
        f"{{protocol: {protocol}, port: {first}, endPort: {last}}}"
        for first, last in spans
        for protocol in ("TCP", "UDP")
    )
    return (
        f"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {name}}}\n"
        "spec: {podSelector: {matchLabels: {app: phone}}, policyTypes: [Ingress], ingress:"
        f" [{{from: [{{podSelector: {{matchLabels: {{role: client}}}}}}], ports: [{ports}]}}]}}\n"
        "---\n"
    )


# ----------------------------------------------------------------------- tables and daemons that go


def _tampering(net: Net) -> list[Kind]:
    both, text, flows = _published(net, SHIFTED, served=20)
    found = [
        Kind(
            name=f"the table of {count} ranges is recreated after tampering",
            states=(_vm(net, 1, _spans(count)),),
            flows=_flows(_spans(count)),
            to=net.pod_address(1),
            tampered=net.pods[0],
        )
        for count in (3, 50)
    ]
    found.append(
        Kind(
            name="the table of Services is recreated after tampering",
            states=(text + _vm(net, 2, both),),
            flows=flows,
            to=(NODE4, NODE6),
            tampered=net.node,
        )
    )
    policed = _policies(net)[0]
    found.append(
        Kind(
            name="the table of a policy is recreated after tampering",
            states=policed.states[:1],
            flows=policed.flows,
            to=policed.to,
            tampered=net.pods[0],
        )
    )
    return found


def _kill(net: Net) -> Kind:
    both, text, flows = _published(net, SHIFTED, served=20)
    return Kind(
        name="the daemon is killed and started again",
        states=(text + _vm(net, 2, both), text + _vm(net, 2, both, RETIRED)),
        flows=flows,
        to=(NODE4, NODE6),
        leaves=True,
        killed=True,
    )
