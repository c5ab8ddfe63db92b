"""What users find on their instances: events, each told once and counted, whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from agent.sources.api import Api
from agent.sources.feedback import MOST_WAITING, NORMAL, WARNING, Feedback
from agent.sources.kubeconfig import load
from agent.sources.meaning import Tiding
from agent.sources.told import Reference
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.instances import EVENTS, RIGHTS, Machines, instance
from tests.spaces import eventually

Json = Any
APPLIED, REJECTED, REFUSED = (
    tiding.value for tiding in (Tiding.APPLIED, Tiding.REJECTED, Tiding.REFUSED)
)


class Told:
    """Feedback to a cluster, with a clock that goes on when it is told to."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.skipped = 0.0
        self.feedback = Feedback(
            Api(load(str(cluster.kubeconfig("portranger")), {})),
            "node-1",
            clock=lambda: time.monotonic() + self.skipped,
            calendar=lambda: time.time() + self.skipped,
        )
        self.vmis = Machines(cluster, namespace)

    def made(self, name: str) -> Reference:
        metadata = self.vmis.make(instance(name, "node-1"))["metadata"]
        return Reference(
            namespace=self.namespace,
            name=name,
            uid=metadata["uid"],
            resource_version=metadata["resourceVersion"],
        )

    def events(self) -> list[Json]:
        found = self.cluster.ask("GET", f"/api/v1/namespaces/{self.namespace}/events")["items"]
        return sorted(found, key=lambda one: one["metadata"]["creationTimestamp"])

    def until(self, true: Callable[[Feedback], bool]) -> bool:
        return eventually(lambda: true(self.feedback), 30)


@contextmanager
def telling(cluster: Cluster, namespace: str) -> Iterator[Told]:
    cluster.grant("portranger", RIGHTS, EVENTS)
    made = Told(cluster, namespace)
    try:
        yield made
    finally:
        made.feedback.close()


@pytest.fixture
def told(cluster: Cluster, namespace: str) -> Iterator[Told]:
    with telling(cluster, namespace) as made:
        yield made


def test_kubectl_describe_tells_the_story(told: Told) -> None:
    web = told.made("web")
    told.feedback.say(web, NORMAL, APPLIED, "1000-8000/tcp is forwarded to 10.0.2.2")
    told.feedback.say(web, WARNING, REJECTED, "metadata.annotations: 9000-8000 ends below")
    assert told.until(lambda it: it.sent == 2)
    text = told.cluster.kubectl("describe", "vmi", "web", "-n", told.namespace)
    _, _, events = text.partition("Events:")
    assert "Normal   PortsApplied" in events
    assert "Warning  PortsRejected" in events
    assert "portranger  1000" in events
    event = told.events()[0]
    assert event["involvedObject"]["uid"] == web.uid
    assert event["source"] == {"component": "portranger", "host": "node-1"}


def test_what_is_said_again_is_counted_at_most_once_a_minute(told: Told) -> None:
    web, other = told.made("web"), told.made("other")
    for _ in range(50):
        told.feedback.say(web, NORMAL, APPLIED, "same")
    told.feedback.say(web, NORMAL, APPLIED, "different")
    told.feedback.say(other, NORMAL, APPLIED, "same")
    assert told.until(lambda it: it.sent == 3)
    assert {one["count"] for one in told.events()} == {1}
    told.skipped += 61
    told.feedback.say(web, NORMAL, APPLIED, "same")
    assert told.until(lambda it: it.sent == 4)
    [counted] = [one for one in told.events() if one["count"] > 1]
    assert counted["count"] == 51
    assert counted["lastTimestamp"] > counted["firstTimestamp"]
    told.skipped += 601
    told.feedback.say(web, NORMAL, APPLIED, "same")
    assert told.until(lambda it: it.sent == 5)
    assert len(told.events()) == 4
    assert told.feedback.dropped == told.feedback.failed == 0


def test_what_was_counted_and_is_gone_is_told_anew(told: Told) -> None:
    """The API server forgets events after an hour."""
    web = told.made("web")
    told.feedback.say(web, NORMAL, APPLIED, "same")
    assert told.until(lambda it: it.sent == 1)
    told.cluster.ask("DELETE", f"/api/v1/namespaces/{told.namespace}/events")
    told.skipped += 61
    told.feedback.say(web, NORMAL, APPLIED, "same")
    assert told.until(lambda it: it.sent == 2)
    assert [one["count"] for one in told.events()] == [2]


def test_one_object_is_cut_short_and_the_others_are_heard(told: Told) -> None:
    web, other = told.made("web"), told.made("other")
    for number in range(30):
        told.feedback.say(web, WARNING, REFUSED, f"number {number}")
    told.feedback.say(other, NORMAL, APPLIED, "quiet")
    assert told.until(lambda it: it.sent == 11)
    assert told.feedback.dropped == 19  # the last one waits
    told.skipped += 60
    for number in range(30, 35):
        told.feedback.say(web, WARNING, REFUSED, f"number {number}")
    assert told.until(lambda it: it.sent == 12 and it.dropped == 23)
    told.skipped += 60
    told.feedback.say(other, NORMAL, APPLIED, "awake")
    assert told.until(lambda it: it.sent == 14)
    assert "number 34" in {one["message"] for one in told.events()}


def test_all_together_are_slowed_down_and_none_is_lost(told: Told) -> None:
    references = [told.made(f"vm-{number}") for number in range(115)]
    began = time.monotonic()
    for reference in references:
        told.feedback.say(reference, NORMAL, APPLIED, "applied")
    said = time.monotonic() - began
    assert told.until(lambda it: it.sent == 115)
    assert said < 0.1
    assert time.monotonic() - began > 2.0  # fifteen more than a hundred, five a second
    assert told.feedback.dropped == told.feedback.failed == 0


def test_an_api_server_that_is_away_is_waited_for_and_nobody_else_waits(told: Told) -> None:
    web = told.made("web")
    told.cluster.kill_apiserver()
    for number in range(3):
        told.feedback.say(web, NORMAL, APPLIED, f"number {number}")
    assert told.until(lambda it: "cannot be reached" in it.trouble)
    began = time.monotonic()
    for _ in range(MOST_WAITING + 100):
        told.feedback.say(web, NORMAL, APPLIED, "more")
    assert time.monotonic() - began < 1.0
    assert 100 <= told.feedback.dropped <= 103
    told.cluster.start_apiserver()
    assert told.until(lambda it: it.sent == 4)
    assert told.feedback.trouble == ""
    assert {one["message"] for one in told.events()} == {*(f"number {n}" for n in range(3)), "more"}


def test_what_is_too_old_when_the_api_server_returns_is_given_up(told: Told) -> None:
    web = told.made("web")
    told.cluster.kill_apiserver()
    told.feedback.say(web, NORMAL, APPLIED, "old")
    assert told.until(lambda it: bool(it.trouble))
    told.skipped += 601
    assert told.until(lambda it: it.failed == 1)
    told.cluster.start_apiserver()
    told.feedback.say(web, NORMAL, APPLIED, "new")
    assert told.until(lambda it: it.sent == 1)
    assert [one["message"] for one in told.events()] == ["new"]


def test_a_right_that_is_missing_is_named_and_may_come_later(told: Told) -> None:
    web = told.made("web")
    told.cluster.grant("portranger", RIGHTS)
    try:
        told.feedback.say(web, NORMAL, APPLIED, "said")
        assert told.until(lambda it: 'cannot create resource "events"' in it.trouble)
        told.skipped += 61
        assert told.until(lambda it: it.failed == 1)
        told.feedback.say(web, NORMAL, APPLIED, "said")
    finally:
        told.cluster.grant("portranger", RIGHTS, EVENTS)
    assert told.until(lambda it: it.sent == 1)
    assert told.feedback.trouble == ""


def test_in_a_namespace_that_goes_nobody_waits(told: Told) -> None:
    gone = Reference(namespace="nowhere", name="web", uid="u", resource_version="1")
    told.feedback.say(gone, NORMAL, APPLIED, "said")
    told.feedback.say(told.made("web"), NORMAL, APPLIED, "said")
    assert told.until(lambda it: it.sent == 1)
    assert told.feedback.failed == 1
    told.cluster.ask("DELETE", f"/api/v1/namespaces/{told.namespace}")
    reference = Reference(namespace=told.namespace, name="web", uid="u", resource_version="1")
    told.feedback.say(reference, NORMAL, APPLIED, "said")
    assert told.until(lambda it: it.failed == 2)
    assert "because it is being terminated" in told.feedback.trouble


def test_long_words_and_long_names_fit(told: Told) -> None:
    web = told.made(f"{'v' * 60}.{'w' * 60}.{'x' * 60}.{'y' * 60}.{'z' * 8}"[:252].rstrip("."))
    told.feedback.say(web, WARNING, REJECTED, "\N{SNOWMAN}" * 2000 + "\0\n")
    assert told.until(lambda it: it.sent + it.failed == 1)
    assert told.feedback.trouble == ""
    [event] = told.events()
    assert 1000 < len(event["message"].encode()) <= 1024
    assert len(event["metadata"]["name"]) <= 253


def test_closing_says_what_is_left_and_does_not_wait_for_ever(
    cluster: Cluster, namespace: str
) -> None:
    with telling(cluster, namespace) as told:
        web = told.made("web")
        told.feedback.say(web, NORMAL, APPLIED, "last words")
    assert [one["message"] for one in told.events()] == ["last words"]
    with telling(cluster, namespace) as told:
        cluster.kill_apiserver()
        told.feedback.say(web, NORMAL, APPLIED, "in vain")
        assert told.until(lambda it: bool(it.trouble))
        began = time.monotonic()
    assert time.monotonic() - began < 3.0
