"""Which device backs a resource is asked for aside, and one answer that cannot be had is no
other's concern."""

from __future__ import annotations

from collections.abc import Mapping

from agent.devices import Devices
from tests.spaces import eventually


def test_what_fails_for_one_pod_is_told_and_the_next_is_asked_about() -> None:
    def asked(netns: str) -> Mapping[str, str]:
        if netns == "pod:a":
            raise ZeroDivisionError("by nothing")
        return {"vendor/net": "eth1"}

    warnings: list[str] = []
    devices = Devices(asked, warnings.append)
    assert devices.of("pod:a") == devices.of("pod:b") == {}
    assert eventually(devices.news)
    assert (devices.of("pod:a"), devices.of("pod:b")) == ({}, {"vendor/net": "eth1"})
    assert warnings == [
        "the devices of pod:a are not known: unexpected ZeroDivisionError: by nothing"
    ]
