"""Events that cannot be written are told in the log; what it is to write them to a cluster is in
tests/kubernetes."""

from __future__ import annotations

from contextlib import closing

from agent.sources.api import Api
from agent.sources.credentials import Credentials, Plain, endpoint
from agent.sources.feedback import NORMAL, Feedback
from agent.sources.told import Reference
from tests.answering import answering, refused, said
from tests.spaces import eventually

WEB = Reference(namespace="a", name="web", uid="u", resource_version="1")


def test_why_events_fail_is_told_once_and_again_after_they_did_not() -> None:
    warnings: list[str] = []
    with answering() as server:
        no, yes = refused(422, "no such word"), said({}, 201)
        server.will(no, no, yes, no)
        api = Api(Credentials(endpoint(server.url), Plain()))
        with closing(Feedback(api, "node", warn=warnings.append)) as feedback:
            for number in range(4):
                feedback.say(WEB, NORMAL, "PortsApplied", f"number {number}")
            assert eventually(lambda: (feedback.sent, feedback.failed) == (1, 3))
    assert len(warnings) == 2
    assert all("events on instances cannot be written: " in one for one in warnings)
    assert all("no such word" in one for one in warnings)
