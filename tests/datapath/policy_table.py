"""Policies, and what passes under each: the table of test_policies.py, judged by hand."""

from tests.datapath.policing import PHONE

IN = f"{PHONE}, policyTypes: [Ingress], ingress: "
OUT = f"{PHONE}, policyTypes: [Egress], egress: "
ANYWHERE = "namespaceSelector: {}"

# Specifications, and below them what is asked: to or from the first machine, by whom, where, and
# whether it passes in IPv4 and in IPv6.
TABLE = {
    "nobody is selected": (
        ["podSelector: {matchLabels: {app: radio}}, policyTypes: [Ingress, Egress]"],
        """
        in  stranger  tcp/80    + +
        in  machine   udp/53    + +
        out stranger  tcp/443   + +
        out machine   tcp/80    + +
        """,
    ),
    "nothing enters anywhere": (
        ["podSelector: {}"],
        """
        in  stranger  tcp/80    - -
        in  front     udp/53    - -
        in  machine   tcp/443   - -
        out stranger  tcp/80    + +
        out odd       udp/5005  + +
        out machine   tcp/80    - -
        """,
    ),
    "nothing leaves anywhere": (
        ["podSelector: {}, policyTypes: [Egress]"],
        """
        in  stranger  tcp/80    + +
        in  front     udp/53    + +
        in  machine   tcp/80    - -
        out stranger  tcp/80    - -
        out front     udp/53    - -
        out machine   tcp/80    - -
        """,
    ),
    "neither for one machine": (
        [f"{PHONE}, policyTypes: [Ingress, Egress]"],
        """
        in  stranger  tcp/80    - -
        in  machine   udp/53    - -
        out stranger  udp/53    - -
        out machine   tcp/80    - -
        """,
    ),
    "everything enters": (
        [IN + "[{}]"],
        """
        in  stranger  tcp/80    + +
        in  odd       udp/5000  + +
        in  machine   tcp/443   + +
        out stranger  tcp/80    + +
        """,
    ),
    "everything leaves": (
        [f"{PHONE}, policyTypes: [Ingress, Egress], egress: [{{}}]"],
        """
        in  stranger  tcp/80    - -
        out stranger  tcp/80    + +
        out keeper    udp/53    + +
        out machine   tcp/8080  + +
        """,
    ),
    "without types, rules for egress make it both": (
        [f"{PHONE}, egress: [{{ports: [{{port: 443}}]}}]"],
        """
        in  stranger  tcp/443   - -
        out stranger  tcp/443   + +
        out stranger  tcp/80    - -
        out stranger  udp/53    - -
        """,
    ),
    "without types, an empty egress is none": (
        [f"{PHONE}, egress: []"],
        """
        in  stranger  tcp/443   - -
        out stranger  tcp/443   + +
        """,
    ),
    "rules of a type that is not named": (
        [f"{PHONE}, policyTypes: [Egress], ingress: [{{ports: [{{port: 1}}]}}], egress: [{{}}]"],
        """
        in  stranger  tcp/80    + +
        out stranger  tcp/80    + +
        """,
    ),
    "rules for egress in a policy for ingress": (
        [f"{PHONE}, policyTypes: [Ingress], egress: [{{ports: [{{port: 1}}]}}]"],
        """
        in  stranger  tcp/80    - -
        out stranger  tcp/80    + +
        """,
    ),
    "a block with a hole": (
        [IN + "[{from: [{ipBlock: {cidr: 198.51.100.0/24, except: [198.51.100.64/27]}}]}]"],
        """
        in  stranger  tcp/80    + -
        in  front     udp/53    + -
        in  odd       tcp/80    - -
        in  odd       udp/53    - -
        in  machine   tcp/80    - -
        """,
    ),
    "a block of IPv6 with a hole": (
        [
            IN + "[{from: [{ipBlock: {cidr: '2001:db8:5::/64', except: ['2001:db8:5::77/128']}}],"
            " ports: [{port: 80}, {protocol: UDP, port: 53}]}]"
        ],
        """
        in  stranger  tcp/80    - +
        in  stranger  udp/53    - +
        in  stranger  tcp/443   - -
        in  odd       tcp/80    - -
        in  machine   tcp/80    - -
        """,
    ),
    "blocks of everybody, with holes": (
        [
            IN + "[{from: [{ipBlock: {cidr: 0.0.0.0/0, except: [198.51.100.77/32]}},"
            " {ipBlock: {cidr: '::/0', except: ['fd01::/16']}}]}]"
        ],
        """
        in  stranger  tcp/80    + +
        in  odd       tcp/80    - +
        in  machine   tcp/80    + -
        """,
    ),
    "another block fills the hole": (
        [
            IN + "[{from: [{ipBlock: {cidr: 198.51.100.0/24, except: [198.51.100.77/32]}},"
            " {ipBlock: {cidr: 198.51.100.77/32}}]}]"
        ],
        """
        in  odd       tcp/80    + -
        in  stranger  tcp/80    + -
        in  machine   tcp/80    - -
        """,
    ),
    "to a block with a hole": (
        [
            OUT + "[{to: [{ipBlock: {cidr: 198.51.100.0/24, except: [198.51.100.77/32]}},"
            " {ipBlock: {cidr: '2001:db8:5::9/128'}}], ports: [{port: 80, endPort: 89}]}]"
        ],
        """
        out stranger  tcp/80    + +
        out front     tcp/89    + -
        out stranger  tcp/90    - -
        out odd       tcp/80    - -
        out machine   tcp/80    - -
        in  stranger  tcp/443   + +
        """,
    ),
    "by labels, in its own namespace": (
        [IN + "[{from: [{podSelector: {matchLabels: {role: web}}}]}]"],
        """
        in  front     tcp/80    + +
        in  front     udp/5005  + +
        in  friend    tcp/80    - -
        in  bare      tcp/80    - -
        in  machine   tcp/80    - -
        in  stranger  tcp/80    - -
        """,
    ),
    "everybody of its own namespace": (
        [IN + "[{from: [{podSelector: {}}]}]"],
        """
        in  front     tcp/80    + +
        in  bare      udp/53    + +
        in  machine   tcp/443   + +
        in  keeper    tcp/80    - -
        in  stranger  tcp/80    - -
        """,
    ),
    "a machine by its labels": (
        [IN + "[{from: [{podSelector: {matchLabels: {role: client}}}], ports: [{port: 443}]}]"],
        """
        in  machine   tcp/443   + +
        in  machine   tcp/80    - -
        in  machine   udp/53    - -
        in  front     tcp/443   - -
        """,
    ),
    "to a machine and to Pods by their labels": (
        [OUT + "[{to: [{podSelector: {matchExpressions: [{key: role, operator: Exists}]}}]}]"],
        """
        out machine   tcp/80    + +
        out front     udp/53    + +
        out bare      tcp/80    - -
        out friend    tcp/80    - -
        out stranger  tcp/80    - -
        """,
    ),
    "namespaces by labels": (
        [IN + "[{from: [{namespaceSelector: {matchLabels: {team: friends}}}]}]"],
        """
        in  friend    tcp/80    + +
        in  keeper    udp/53    + +
        in  front     tcp/80    - -
        in  other     tcp/80    - -
        in  lost      tcp/80    - -
        in  machine   tcp/80    - -
        """,
    ),
    "all namespaces": (
        [IN + f"[{{from: [{{{ANYWHERE}}}]}}]"],
        """
        in  front     tcp/80    + +
        in  keeper    tcp/80    + +
        in  other     udp/53    + +
        in  lost      tcp/80    + +
        in  machine   tcp/80    + +
        in  stranger  tcp/80    - -
        in  odd       udp/53    - -
        """,
    ),
    "a namespace by its name": (
        [
            IN + "[{from: [{namespaceSelector:"
            " {matchLabels: {kubernetes.io/metadata.name: nowhere}}}]}]"
        ],
        """
        in  lost      tcp/80    + +
        in  other     tcp/80    - -
        in  front     tcp/80    - -
        """,
    ),
    "namespaces but one, by name": (
        [
            OUT + "[{to: [{namespaceSelector: {matchExpressions:"
            " [{key: kubernetes.io/metadata.name, operator: NotIn, values: [friends]}]}}]}]"
        ],
        """
        out other     tcp/80    + +
        out lost      udp/53    + +
        out machine   tcp/80    + +
        out friend    tcp/80    - -
        out stranger  tcp/80    - -
        """,
    ),
    "both together: labels in namespaces": (
        [
            IN + "[{from: [{namespaceSelector: {matchLabels: {team: friends}},"
            " podSelector: {matchLabels: {role: web}}}]}]"
        ],
        """
        in  friend    tcp/80    + +
        in  keeper    tcp/80    - -
        in  front     tcp/80    - -
        in  other     tcp/80    - -
        """,
    ),
    "one or the other: labels, and namespaces": (
        [
            IN + "[{from: [{namespaceSelector: {matchLabels: {team: friends}}},"
            " {podSelector: {matchLabels: {role: web}}}]}]"
        ],
        """
        in  friend    tcp/80    + +
        in  keeper    tcp/80    + +
        in  front     tcp/80    + +
        in  other     tcp/80    - -
        in  bare      tcp/80    - -
        """,
    ),
    "operator In": (
        [
            IN + f"[{{from: [{{{ANYWHERE}, podSelector: {{matchExpressions:"
            " [{key: role, operator: In, values: [db, client]}]}}]}]"
        ],
        """
        in  keeper    tcp/80    + +
        in  machine   tcp/80    + +
        in  friend    tcp/80    - -
        in  bare      tcp/80    - -
        """,
    ),
    "operator NotIn, which holds without the label": (
        [
            IN + f"[{{from: [{{{ANYWHERE}, podSelector: {{matchExpressions:"
            " [{key: role, operator: NotIn, values: [web, db]}]}}]}]"
        ],
        """
        in  bare      tcp/80    + +
        in  machine   udp/53    + +
        in  keeper    tcp/80    - -
        in  lost      tcp/80    - -
        in  stranger  tcp/80    - -
        """,
    ),
    "operator Exists": (
        [
            IN + f"[{{from: [{{{ANYWHERE}, podSelector: {{matchExpressions:"
            " [{key: tier, operator: Exists}]}}]}]"
        ],
        """
        in  front     tcp/80    + +
        in  friend    tcp/80    + +
        in  keeper    tcp/80    - -
        in  machine   tcp/80    - -
        """,
    ),
    "operator DoesNotExist": (
        [
            IN + f"[{{from: [{{{ANYWHERE}, podSelector: {{matchExpressions:"
            " [{key: tier, operator: DoesNotExist}]}}]}]"
        ],
        """
        in  keeper    tcp/80    + +
        in  bare      tcp/80    + +
        in  machine   tcp/80    + +
        in  friend    tcp/80    - -
        """,
    ),
    "labels and operators, of namespaces and Pods": (
        [
            IN + "[{from: [{namespaceSelector: {matchLabels: {stage: prod},"
            " matchExpressions: [{key: team, operator: DoesNotExist}]},"
            " podSelector: {matchLabels: {role: web},"
            " matchExpressions: [{key: tier, operator: In, values: [front, back]}]}}]}]"
        ],
        """
        in  front     tcp/80    + +
        in  friend    tcp/80    - -
        in  other     tcp/80    - -
        in  lost      tcp/80    - -
        in  bare      tcp/80    - -
        """,
    ),
    "selected by every operator at once": (
        [
            (
                "podSelector: {matchLabels: {tier: back}, matchExpressions: ["
                "{key: app, operator: In, values: [phone, fax]}, {key: tier, operator: Exists},"
                " {key: app, operator: NotIn, values: [radio]},"
                " {key: old, operator: DoesNotExist}]}"
            )
        ],
        """
        in  stranger  tcp/80    - -
        out machine   tcp/80    + +
        """,
    ),
    "not selected, by one operator of four": (
        [
            (
                "podSelector: {matchLabels: {tier: back}, matchExpressions: ["
                "{key: app, operator: In, values: [phone, fax]}, {key: tier, operator: Exists},"
                " {key: app, operator: NotIn, values: [phone]},"
                " {key: old, operator: DoesNotExist}]}"
            )
        ],
        """
        in  stranger  tcp/80    + +
        """,
    ),
    "ports, of TCP unless it is said": (
        [IN + "[{ports: [{port: 53}, {port: 443}, {protocol: UDP, port: 85}]}]"],
        """
        in  stranger  tcp/443   + +
        in  stranger  udp/85    + +
        in  stranger  udp/53    - -
        in  stranger  tcp/85    - -
        in  stranger  tcp/80    - -
        """,
    ),
    "ranges": (
        [
            IN + "[{ports: [{port: 80, endPort: 89},"
            " {protocol: UDP, port: 5000, endPort: 5005}, {port: 443, endPort: 443}]}]"
        ],
        """
        in  stranger  tcp/80    + +
        in  machine   tcp/89    + +
        in  stranger  tcp/90    - -
        in  stranger  udp/85    - -
        in  stranger  udp/5000  + +
        in  stranger  udp/5005  + +
        in  machine   udp/5006  - -
        in  stranger  tcp/443   + +
        in  stranger  tcp/8080  - -
        """,
    ),
    "all ports of a protocol": (
        [IN + "[{ports: [{protocol: UDP}]}]"],
        """
        in  stranger  udp/53    + +
        in  machine   udp/5006  + +
        in  stranger  tcp/80    - -
        """,
    ),
    "all ports of TCP, outwards": (
        [OUT + "[{ports: [{}]}]"],
        """
        out stranger  tcp/80    + +
        out machine   tcp/443   + +
        out stranger  udp/53    - -
        """,
    ),
    "nothing but SCTP": (
        [IN + "[{ports: [{protocol: SCTP, port: 80}, {protocol: SCTP, port: 1, endPort: 65535}]}]"],
        """
        in  stranger  tcp/80    - -
        in  stranger  udp/53    - -
        """,
    ),
    "names of its own ports": (
        [IN + "[{ports: [{port: http}, {port: dns, protocol: UDP}]}]"],
        """
        in  stranger  tcp/80    + +
        in  machine   udp/53    + +
        in  stranger  tcp/85    - -
        in  stranger  udp/85    - -
        """,
    ),
    "names that no port of that protocol has": (
        [IN + "[{ports: [{port: dns}, {port: http, protocol: UDP}, {port: ssh}]}]"],
        """
        in  stranger  tcp/80    - -
        in  stranger  udp/53    - -
        in  machine   tcp/443   - -
        """,
    ),
    "names of ports of the others": (
        [
            OUT
            + f"[{{to: [{{{ANYWHERE}}}], ports: [{{port: http}}, {{port: dns, protocol: UDP}}]}}]"
        ],
        """
        out front     tcp/8080  + +
        out front     tcp/8090  - -
        out friend    tcp/8090  + +
        out friend    tcp/8080  - -
        out machine   tcp/85    + +
        out machine   tcp/80    - -
        out machine   udp/53    + +
        out keeper    udp/5005  + +
        out keeper    udp/53    - -
        out stranger  tcp/8080  - -
        """,
    ),
    "names of ports of whomever": (
        [OUT + "[{ports: [{port: http}]}]"],
        """
        out front     tcp/8080  + +
        out friend    tcp/8090  + +
        out machine   tcp/85    + +
        out keeper    tcp/80    - -
        out stranger  tcp/80    - -
        """,
    ),
    "names of ports of whoever is in a block": (
        [OUT + "[{to: [{ipBlock: {cidr: 198.51.100.0/27}}], ports: [{port: http}]}]"],
        """
        out front     tcp/8080  + -
        out friend    tcp/8090  + -
        out front     tcp/8090  - -
        out machine   tcp/85    - -
        """,
    ),
    "policies add up": (
        [
            IN + "[]",
            IN + "[{from: [{podSelector: {matchLabels: {role: web}}}], ports: [{port: 80}]}]",
            IN + "[{from: [{ipBlock: {cidr: 198.51.100.9/32}}], ports: [{port: 443}]}]",
            "podSelector: {}, ingress: [{ports: [{protocol: UDP, port: 53}]}]",
        ],
        """
        in  front     tcp/80    + +
        in  front     tcp/443   - -
        in  stranger  tcp/80    - -
        in  stranger  tcp/443   + -
        in  odd       udp/53    + +
        in  odd       udp/85    - -
        """,
    ),
    "ranges of policies that overlap": (
        [
            IN + "[{ports: [{port: 80, endPort: 86}]}]",
            IN + "[{ports: [{port: 85, endPort: 89}]}]",
            IN + "[{ports: [{port: 8080, endPort: 8089}]}, {ports: [{port: 8090}]}]",
        ],
        """
        in  stranger  tcp/80    + +
        in  stranger  tcp/85    + +
        in  stranger  tcp/89    + +
        in  stranger  tcp/90    - -
        in  stranger  tcp/8090  + +
        """,
    ),
    "who is allowed nothing by one and everything by another": (
        ["podSelector: {}, policyTypes: [Ingress, Egress]", IN + "[{}]"],
        """
        in  stranger  tcp/80    + +
        out stranger  tcp/80    - -
        """,
    ),
    "rules of one policy are not mixed": (
        [
            IN + "[{from: [{podSelector: {matchLabels: {role: web}}}], ports: [{port: 80}]},"
            " {from: [{podSelector: {matchLabels: {role: client}}}],"
            " ports: [{protocol: UDP, port: 53}]}]"
        ],
        """
        in  front     tcp/80    + +
        in  front     udp/53    - -
        in  machine   udp/53    + +
        in  machine   tcp/80    - -
        """,
    ),
    "empty lists are everything": (
        [IN + "[{from: [], ports: []}]", OUT + "[{to: [], ports: [{port: 80}]}]"],
        """
        in  stranger  tcp/80    + +
        in  machine   udp/53    + +
        out stranger  tcp/80    + +
        out machine   tcp/443   - -
        out stranger  udp/53    - -
        """,
    ),
    "an empty list of ports of some": (
        [IN + "[{from: [{podSelector: {matchLabels: {role: web}}}], ports: []}]"],
        """
        in  front     tcp/8090  + +
        in  front     udp/5006  + +
        in  stranger  tcp/80    - -
        """,
    ),
    "inwards and outwards, each by its own rules": (
        [
            (
                f"{PHONE}, ingress: [{{from: [{{podSelector: {{matchLabels: {{role: web}}}}}}],"
                " ports: [{port: 80}]}], egress: [{to: [{ipBlock: {cidr: '2001:db8:5::/64'}}],"
                " ports: [{protocol: UDP, port: 53}]}]"
            )
        ],
        """
        in  front     tcp/80    + +
        in  front     udp/53    - -
        in  stranger  tcp/80    - -
        out front     udp/53    - +
        out stranger  udp/53    - +
        out front     tcp/80    - -
        """,
    ),
    "both ends have a word": (
        [
            f"{PHONE}, policyTypes: [Egress], egress: [{{to: [{{podSelector: {{}}}}]}}]",
            "podSelector: {matchLabels: {role: client}}, ingress: [{ports: [{port: 80}]}]",
        ],
        """
        out machine   tcp/80    + +
        out machine   tcp/443   - -
        out front     tcp/443   + +
        out friend    tcp/80    - -
        """,
    ),
}
