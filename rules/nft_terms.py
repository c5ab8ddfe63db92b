"""What rules of a node compare packets with, beyond addresses and ports: whether they are for any
of its own addresses, whose share of the flows they are, whether their answers would go another way.
In the words of nft, in those of libnftables, and back."""

from collections.abc import Iterator
from ipaddress import ip_address

from rules.model import OWN, Address, Detour, Family, Protocol, Share, link_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SEED = 0x70727467  # the same in all rules: each flow has one number, so one endpoint
Json = dict[str, object]


def equal(left: Json, right: object, how: str = "==") -> Json:
    """A comparison."""
    return {"match": {"op": how, "left": left, "right": right}}


def field(protocol: str, name: str) -> Json:
    """A field of a header."""
    return {"payload": {"protocol": protocol, "field": name}}


def meta(key: str) -> Json:
    """What is known of a packet beside its headers."""
    return {"meta": {"key": key}}


# ------------------------------------------------------------------------- any address of its own

_LOCAL = equal({"fib": {"result": "type", "flags": ["daddr"]}}, "local")
_LOCAL_TOO = equal({"fib": {"result": "type", "flags": "daddr"}}, "local")  # from nft 1.1.4 on
_OUTSIDE = {
    Family.IP: equal(field("ip", "daddr"), {"prefix": {"addr": "127.0.0.0", "len": 8}}, "!="),
    Family.IP6: equal(field("ip6", "daddr"), "::1", "!="),
}
_OUTSIDE_WORDS = {Family.IP: "ip daddr != 127.0.0.0/8", Family.IP6: "ip6 daddr != ::1"}


def destination_words(destination: Address, family: Family) -> str:
    """In the words of nft."""
    if destination == OWN[family]:
        return f"{_OUTSIDE_WORDS[family]} fib daddr type local"
    return f"{family.value} daddr {destination}"


def destination_json(destination: Address, family: Family) -> list[Json]:
    """In the words of libnftables."""
    if destination == OWN[family]:
        return [_OUTSIDE[family], _LOCAL]
    return [equal(field(family.value, "daddr"), str(destination))]


# ---------------------------------------------------------------------------------------- shares


def share_words(share: Share, family: Family, protocol: Protocol) -> str:
    """In the words of nft."""
    sender = f"{family.value} saddr"
    if not share.client:
        sender += f" . {protocol.value} sport"
    numbers = ", ".join(map(str, share.at))
    numbers = f"{{ {numbers} }}" if len(share.at) > 1 else numbers
    return f"jhash {sender} mod {share.of} seed {SEED:#x} {numbers}"


def share_json(share: Share, family: Family, protocol: Protocol) -> Json:
    """In the words of libnftables."""
    numbers: object = {"set": [*share.at]} if len(share.at) > 1 else share.at[0]
    return equal({"jhash": _number(share, family, protocol)}, numbers)


def _number(share: Share, family: Family, protocol: Protocol) -> Json:
    """How a flow gets its number."""
    sender = field(family.value, "saddr")
    if not share.client:
        sender = {"concat": [sender, field(protocol.value, "sport")]}
    return {"mod": share.of, "seed": SEED, "expr": sender}


# --------------------------------------------------------------------------------------- detours

_TRANSLATED = equal({"ct": {"key": "status"}}, "dnat", "in")
_SAME_LINK: Json = {"concat": [meta("iifname"), meta("oifname")]}


def detour_words(detour: Detour, family: Family) -> str:
    """In the words of nft."""
    if detour.links:
        pairs = ", ".join(f'"{link}" . "{link}"' for link in detour.links)
        words = f"iifname . oifname {{ {pairs} }}"
    else:
        words = f"{family.value} daddr {{ {', '.join(map(str, detour.remote))} }}"
    published = ", ".join(map(str, detour.published))
    return f"{words} ct status dnat ct original {family.value} daddr {{ {published} }}"


def detour_json(detour: Detour, family: Family) -> Iterator[Json]:
    """In the words of libnftables."""
    if detour.links:
        yield equal(_SAME_LINK, {"set": [{"concat": [link, link]} for link in detour.links]})
    else:
        yield equal(field(family.value, "daddr"), {"set": [str(one) for one in detour.remote]})
    yield _TRANSLATED
    yield equal(_asked_for(family), {"set": [str(one) for one in detour.published]})


def _asked_for(family: Family) -> Json:
    return {"ct": {"key": f"{family.value} daddr", "dir": "original"}}


# ------------------------------------------------------------------------------------------ back


class Terms:
    """What was found of them in a rule, until all of it is known."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def take(self, condition: "Any") -> bool:
        """Whether it is one of them; raises for what is nearly one."""
        name, value = self._read(condition)
        if name in self._found:
            raise ValueError("matched twice")
        if name:
            self._found[name] = value
        return bool(name)

    def _read(self, condition: "Any") -> "tuple[str, Any]":
        if condition in (_LOCAL, _LOCAL_TOO):
            return "own", True
        if condition == _TRANSLATED:
            return "translated", True
        for family in Family:
            if condition == _OUTSIDE[family]:
                return "outside", family
        match = condition["match"]
        left, right = match["left"], match["right"]
        if match["op"] != "==":
            raise ValueError(match["op"])
        if "jhash" in left:
            return "share", (left["jhash"], tuple(sorted(map(int, _members(right)))))
        if left == _SAME_LINK:
            return "links", tuple(sorted(_link(one) for one in _members(right)))
        for family in Family:
            if left == _asked_for(family):
                return "published", (family, _addresses(right, family))
            if left == field(family.value, "daddr") and isinstance(right, dict):
                return "remote", (family, _addresses(right, family))
        return "", None

    def told(self, families: set[Family], others: "dict[str, Any]") -> "dict[str, Any]":
        """The fields of a rule that they are, once its other conditions are read; families get
        those that they name. Raises where a part is missing. A single endpoint is no set to nft: it
        was read as the destination."""
        found = self._found
        fields: dict[str, Any] = {}
        if found.get("own") or "outside" in found:
            families.add(family := found["outside"])
            fields["destination"] = OWN[family] if found["own"] else None
        if "published" in found:
            family, published = found["published"]
            families.add(family)
            links, remote = found.get("links", ()), found.get("remote", (family, ()))
            if not links and not remote[1]:
                remote = (family, (others.pop("destination"),))
            families.add(remote[0])
            fields["detour"] = Detour(published=published, links=links, remote=remote[1])
        if found.keys() & {"links", "remote", "translated"} and not (
            "published" in found and found["translated"]
        ):
            raise ValueError("a part of a detour")
        return fields

    def share(self, family: Family, protocol: Protocol | None) -> Share | None:
        """The share that it is, in a rule for these packets."""
        if "share" not in self._found:
            return None
        made, at = self._found["share"]
        share = Share(int(made["mod"]), at, "concat" not in made["expr"])
        if protocol is None or made != _number(share, family, protocol):
            raise ValueError(made)
        return share


def _members(right: "Any") -> "list[Any]":
    return right["set"] if isinstance(right, dict) and "set" in right else [right]


def _link(pair: "Any") -> str:
    first, second = pair["concat"]
    if first != second or not isinstance(first, str):
        raise ValueError(pair)
    return link_name(first)


def _addresses(right: "Any", family: Family) -> tuple[Address, ...]:
    found = sorted(ip_address(one) for one in _members(right) if isinstance(one, str))
    if len(found) != len(_members(right)) or any(Family.of(one) is not family for one in found):
        raise ValueError(right)
    return tuple(found)
