"""Which link stands for a network resource, as device plugins tell it in the environment."""

from __future__ import annotations

import itertools
import json

import pytest

from rules.manifests.resources import backing_links

RED = "bridge.network.kubevirt.io/red"
BLUE = "bridge.network.kubevirt.io/blue"


def told(name: object = RED, *links: object, protocol: object = "Ethernet") -> str:
    interfaces = [{"name": link, "protocol": protocol} for link in links]
    return json.dumps({"name": name, "interfaces": interfaces})


def variable(suffix: str, text: str) -> tuple[str, str]:
    return f"NETWORK_INTERFACE_RESOURCES_{suffix}", text


def test_the_example_of_the_source_document() -> None:
    text = """{
      "name": "bridge.network.kubevirt.io/red",
      "interfaces": [{"name": "eth-red01", "protocol": "Ethernet"},
                     {"name": "eth-red02", "protocol": "Ethernet"}]
    }"""
    assert backing_links([variable("red", text)]) == {RED: "eth-red01"}


def test_each_resource_has_its_link_and_other_variables_say_nothing() -> None:
    environment = [
        ("PATH", "/bin"),
        variable("red", told(RED, "red0")),
        variable("blue", told(BLUE, "blue0")),
        ("KUBEVIRT_RESOURCE_NAME_red", told("other.io/red", "x0")),
        ("network_interface_resources_red", told("other.io/red", "x0")),
    ]
    assert backing_links(environment) == {RED: "red0", BLUE: "blue0"}


def test_of_several_plugins_the_same_one_wins_in_whatever_order_they_are_told() -> None:
    variables = [
        variable("b", told(RED, "b0")),
        variable("a", told(RED, "a0")),
        variable("c", told(RED, "c0")),
        variable("c", told(RED, "c1")),
    ]
    for order in itertools.permutations(variables):
        assert backing_links(order) == {RED: "a0"}


def test_a_plugin_that_tells_nothing_of_use_leaves_it_to_the_next() -> None:
    variables = [
        variable("a", told(RED, "ib0", protocol="InfiniBand")),
        variable("b", told(RED)),
        variable("c", told(RED, "red0")),
    ]
    assert backing_links(variables) == {RED: "red0"}


def test_the_first_interface_is_the_first_of_ethernet() -> None:
    interfaces = [
        {"name": "ib0", "protocol": "InfiniBand"},
        {"name": "odd0"},
        {"name": "lower0", "protocol": "ethernet"},
        {"name": "red0", "protocol": "Ethernet"},
        {"name": "red1", "protocol": "Ethernet"},
    ]
    text = json.dumps({"name": RED, "interfaces": interfaces})
    assert backing_links([variable("red", text)]) == {RED: "red0"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "red",
        "{",
        "[]",
        "null",
        "1" * 5000,
        "[" * 200_000,
        "{}",
        json.dumps({"name": RED}),
        json.dumps({"name": RED, "interfaces": None}),
        json.dumps({"name": RED, "interfaces": "eth0"}),
        json.dumps({"name": RED, "interfaces": ["eth0", None, 7, ["eth0"]]}),
        json.dumps({"interfaces": [{"name": "eth0", "protocol": "Ethernet"}]}),
        told(RED, "eth0", protocol=["Ethernet"]),
        *(told(name, "eth0") for name in ("", "red", "/red", "io/", "a/b/c", 7, None, [RED])),
        *(
            told(name, "eth0")
            for name in ("io/r\nd", "io/\x1b[2J", "io/r\u202ed", "io/" + "x" * 400)
        ),
        *(told(RED, link) for link in ("", ".", "..", "a/b", "a b", "a:1", "x" * 16, 7, None)),
        *(told(RED, link) for link in ("eth\n0", "eth\x000", "\x1b[2J", "\u202e", ["eth0"])),
    ],
)
def test_what_does_not_have_the_form_is_passed_over(text: str) -> None:
    good = variable("z", told(BLUE, "blue0"))
    assert backing_links([variable("a", text), good]) == {BLUE: "blue0"}


def test_a_link_may_have_any_name_the_kernel_takes() -> None:
    for link in ("e", "eth0.100", "net-red", "x" * 15, "a_b"):
        assert backing_links([variable("red", told(RED, link))]) == {RED: link}
