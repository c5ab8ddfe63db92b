"""Which link of a pod stands for a network resource, as device plugins tell it: each sets a
variable in the environment of the pod, with JSON in it.

The pod's user can write there what he likes, so what is read here is shown and never acted on; and
whatever does not have the form is passed over.
"""

import json
from collections.abc import Iterable, Iterator

PREFIX = "NETWORK_INTERFACE_RESOURCES_"
ETHERNET = "Ethernet"  # the one protocol there is: bridged, without the pod's own addresses

_LONGEST_LINK = 15  # bytes, as in the kernel
_LONGEST_NAME = 253 + 1 + 63  # of a resource: a domain, a slash and a name


def backing_links(environment: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The link of each resource: the first that its plugin names, and where several plugins expose
    the same network, that of the variable whose name comes first, wherever it stands."""
    found: dict[str, str] = {}
    for variable, text in sorted(environment):
        if variable.startswith(PREFIX):
            for resource, link in _told(text):
                found.setdefault(resource, link)
    return found


def _told(text: str) -> Iterator[tuple[str, str]]:
    """The resource and its link, where the variable tells of them."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(told, dict) or not _is_resource(told.get("name")):
        return
    interfaces = told.get("interfaces")
    for one in interfaces if isinstance(interfaces, list) else ():
        if isinstance(one, dict) and one.get("protocol") == ETHERNET and _is_link(one.get("name")):
            yield told["name"], one["name"]
            return


def _is_resource(name: object) -> bool:
    """`<device-plugin-name>/<network-name>`"""
    return (
        isinstance(name, str)
        and len(name) <= _LONGEST_NAME
        and name.isascii()
        and name.isprintable()
        and name.count("/") == 1
        and all(name.split("/"))
    )


def _is_link(name: object) -> bool:
    """What the kernel takes for the name of a link, and a terminal for plain text."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= _LONGEST_LINK
        and name.isascii()
        and name.isprintable()
        and name not in (".", "..")
        and not any(letter in "/: " for letter in name)
    )
