"""Who a manifest is about, and the annotations in it that speak to us; the first things read
of every kind."""

from functools import lru_cache
from ipaddress import ip_address

from rules.manifests.fields import Fields, as_text, nearest
from rules.model import Address, is_link_name
from rules.problems import Path

PREFIX = "portranger.io/"
PORT_RANGES = PREFIX + "port-ranges"
NETNS = PREFIX + "netns"
INTERFACE = PREFIX + "interface"
GUEST = PREFIX + "guest"
ADDRESS = PREFIX + "address"
BARE_METAL = (NETNS, INTERFACE, GUEST, ADDRESS)
OURS = (PORT_RANGES, *BARE_METAL)

ENDS_PREFIX = "portrange.alpha.kubernetes.io/"
PORT_END = ENDS_PREFIX + "port-end-"

UNNAMED = "unnamed"
_LOWER = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
_LONGEST_LABEL = 63
_LONGEST_SUBDOMAIN = 253
_LONGEST_FILE_NAME = 255
_LONGEST_PATH = 4095


def identity(metadata: Fields) -> tuple[str, str]:
    """The namespace and the name a manifest gives its object."""
    namespace = metadata.string("namespace")
    if namespace is not None and not is_label(namespace):
        metadata.problem(
            "bad-name",
            "is not a valid namespace",
            "Use at most 63 lower-case letters, digits and dashes, no dash at either end.",
            at=("namespace",),
            value=namespace,
        )
    return namespace or "default", _name(metadata)


def _name(metadata: Fields) -> str:
    name = metadata.string("name")
    if name is None:
        if metadata.given("generateName"):
            metadata.problem(
                "missing",
                "is missing; generateName is for an API server to fill in",
                "Add name: with a name of its own.",
                at=("name",),
            )
        return UNNAMED
    if not is_subdomain(name):
        metadata.problem(
            "bad-name",
            "is not a valid name",
            "Use at most 253 lower-case letters, digits, dashes and dots, "
            "each part with a letter or digit at both ends.",
            at=("name",),
            value=name,
        )
    return name


def is_label(text: str) -> bool:
    """Whether it is a DNS label as Kubernetes wants them."""
    return (
        0 < len(text) <= _LONGEST_LABEL
        and _LOWER.issuperset(text)
        and text[0] != "-"
        and text[-1] != "-"
    )


def is_subdomain(text: str) -> bool:
    """Whether it is a DNS subdomain as Kubernetes wants them; its parts may be long."""
    return len(text) <= _LONGEST_SUBDOMAIN and all(
        part and _LOWER.issuperset(part) and part[0] != "-" and part[-1] != "-"
        for part in text.split(".")
    )


def labels(*written: Fields) -> tuple[tuple[str, str], ...]:
    """The labels in these mappings, sorted; of one key, what the first of them says counts."""
    found: dict[str, str] = {}
    for mapping in written:
        for key, value in mapping.values.items():
            text = as_text(value)
            if text is None:
                mapping.problem(
                    "not-a-string",
                    "must be a string",
                    "Put it in quotes.",
                    at=(str(key),),
                    value=value,
                )
            else:
                found.setdefault(str(key), text)
    return tuple([_label(*pair) for pair in sorted(found.items())])


@lru_cache(1024)
def _label(key: str, text: str) -> tuple[str, str]:
    """One object for the same label: thousands of machines have it."""
    return key, text


# A tenant may write thousands of annotations: each takes a while to be compared with ours.
MOST_COMPARED = 50
PREFIXES = (PREFIX, ENDS_PREFIX)


class Annotations:
    """Our annotations of one manifest: the text of each, and where it is written."""

    __slots__ = ("document", "texts")

    def __init__(self, document: Fields) -> None:
        self.document = document
        self.texts: dict[str, tuple[str, Path]] = {}

    def collect(self, metadata: Fields) -> None:
        """Take up those of one metadata; what an earlier one said stands."""
        annotations = metadata.mapping("annotations")
        odd: list[str] = []
        for key, value in annotations.values.items():
            if isinstance(key, str) and key.startswith("portrange"):
                if is_ours(key):
                    self._take(annotations, key, value)
                else:
                    odd.append(key)
        for key in odd[:MOST_COMPARED]:
            close = nearest(key, OURS, 0.9)
            if close or key.startswith(PREFIXES):
                annotations.unknown(key, (close,) if close else (*OURS, f"{PORT_END}<port name>"))
        rest = sum(key.startswith(PREFIXES) for key in odd[MOST_COMPARED:])
        if rest:
            annotations.problem(
                "unknown-key", f"has {rest} more keys that are not known", "Remove them."
            )

    def _take(self, annotations: Fields, key: str, value: object) -> None:
        text = as_text(value)
        if text is None:
            annotations.problem(
                "not-a-string", "must be a string", "Put it in quotes.", at=(key,), value=value
            )
            return
        self.texts.setdefault(key, (text, (*annotations.path, key)))

    def problem(self, key: str, code: str, what: str, fix: str, value: object = None) -> None:
        """Note what is wrong with an annotation, or with the part of it that is given."""
        text, path = self.texts[key]
        at = path[len(self.document.path) :]
        self.document.problem(code, what, fix, at=at, value=text if value is None else value)

    def text(self, key: str) -> str | None:
        """What an annotation says."""
        return self.texts[key][0] if key in self.texts else None


def refuse_bare_metal(annotations: Annotations) -> None:
    """Note, and forget, the annotations that would lead us to another namespace or address: on bare
    metal root writes them, but in Kubernetes a tenant could."""
    for key in BARE_METAL:
        if key in annotations.texts:
            annotations.problem(
                key,
                "tenant-annotation",
                "is for bare metal only, and refused from Kubernetes",
                "Remove the annotation: the pod's namespace, interface and addresses are found.",
            )
            del annotations.texts[key]


def is_ours(key: str) -> bool:
    """Whether an annotation of that key is for us to read."""
    return key in OURS or (key.startswith(PORT_END) and key != PORT_END)


def netns(annotations: Annotations) -> str | None:
    """The namespace an annotation names, by name or by absolute path."""
    text = annotations.text(NETNS)
    others = ("pid:", "pod:", "node:")
    named = text is not None and is_file_name(text) and not text.startswith(others)
    if text is not None and not (is_absolute_path(text) or named):
        annotations.problem(
            NETNS,
            "bad-annotation",
            "is neither the name of a network namespace nor an absolute path",
            "Write a name as `ip netns` lists it, or a path such as /run/netns/blue without '..'.",
        )
    return text


def short(netns: str) -> str:
    """The name of a namespace that is written as a path to it: one namespace, one spelling."""
    for folder in ("/run/netns/", "/var/run/netns/"):
        if netns.startswith(folder) and is_file_name(netns.removeprefix(folder)):
            return netns.removeprefix(folder)
    return netns


def is_file_name(text: str) -> bool:
    """Whether it can stand for one file in a directory."""
    return _is_tidy(text, _LONGEST_FILE_NAME) and "/" not in text and text not in (".", "..")


def is_absolute_path(text: str) -> bool:
    """Whether it is an absolute path that never turns back."""
    return text.startswith("/") and _is_tidy(text, _LONGEST_PATH) and ".." not in text.split("/")


def _is_tidy(text: str, most: int) -> bool:
    return (
        text.isprintable()
        and not any(map(str.isspace, text))
        and 0 < len(text.encode(errors="replace")) <= most
    )


def entry(annotations: Annotations) -> str | None:
    """The link an annotation lets traffic enter on."""
    text = annotations.text(INTERFACE)
    if text is not None and not is_link_name(text):
        annotations.problem(
            INTERFACE,
            "bad-annotation",
            "cannot be the name of a network interface",
            "Write a name as `ip link` lists it, such as eth0, of letters, digits and ._- only.",
        )
    return text


def addresses(annotations: Annotations, key: str) -> tuple[Address, ...]:
    """The address or the two addresses an annotation names, at most one per family."""
    text = annotations.text(key)
    found: list[Address] = []
    for item in text.split(",") if text is not None else ():
        address = _address(annotations, key, item.strip())
        if address is None:
            continue
        if any(address.version == other.version for other in found):
            annotations.problem(
                key,
                "bad-annotation",
                f"names two IPv{address.version} addresses",
                "Keep one address of each family.",
            )
        found.append(address)
    return tuple(found)


def _address(annotations: Annotations, key: str, item: str) -> Address | None:
    try:
        address = ip_address(item)
    except ValueError:
        what = "is not an IP address"
    else:
        if not is_elsewhere(address):
            return address
        what = "is not an address a guest can have"
    fix = "Write one IPv4 address, one IPv6 address, or both with a comma between them."
    annotations.problem(key, "bad-annotation", what, fix, item)
    return None


def is_elsewhere(address: Address) -> bool:
    """Whether packets to that address can never arrive at one machine of a routed network."""
    if address.version == 6 and (address.ipv4_mapped or address.scope_id):
        return True
    return address.is_link_local or is_special(address)


def is_special(address: Address) -> bool:
    """Whether no network of machines can hold that address."""
    return (
        address.is_unspecified
        or address.is_loopback
        or address.is_multicast
        or address.is_reserved
        or (address.version == 4 and int(address) >> 24 == 0)
    )
