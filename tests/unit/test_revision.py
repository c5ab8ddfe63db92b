"""Revisions: how snapshots are numbered, and when what somebody asks about counts as applied."""

import pytest

from agent.revision import Revision, Revisions, Taken, combined, digest
from agent.status import Standing, State, Status
from agent.waiting import Question, judged, question
from rules.model import NODE, Pending
from rules.problems import Problem
from rules.values import replace


def standing(netns: str, state: State = State.IN_SYNC, why: str = "") -> Standing:
    return Standing(netns=netns, state=state, since=1.0, why=why)


def status(revision: Revision, *standings: Standing, problems: tuple[Problem, ...] = ()) -> Status:
    return Status(
        version="1",
        pid=2,
        started=0.0,
        source="/etc/m",
        revision=revision,
        namespaces=standings,
        problems=problems,
    )


A, B = digest("a"), digest("b")
FILES = {
    "/etc/m/a.yaml": Taken(sha256=A, namespaces=frozenset({"blue"})),
    "/etc/m/b.yaml": Taken(sha256=B, namespaces=frozenset({"red"})),
}
DONE = Revision(wanted=7, applied=7, checked=True, files=FILES)


def of(name: str, sha256: str) -> Question:
    return Question(files=((name, sha256),))


# ------------------------------------------------------------------------------------- numbers


def test_a_later_run_has_higher_numbers() -> None:
    earlier, later = Revisions(100.0), Revisions(101.0)
    for _ in range(900):
        earlier.take()
    assert later.take() > earlier.wanted


def test_a_revision_is_applied_once_its_flows_are_flushed() -> None:
    revisions = Revisions(0.001)
    revisions.take()
    assert not revisions.advance(settled=True, asked=3, done=2)
    assert revisions.advance(settled=True, asked=3, done=3)
    assert revisions.applied == revisions.wanted


def test_flows_that_are_flushed_for_later_revisions_do_not_hold_up_earlier_ones() -> None:
    revisions = Revisions(0.001)
    first = revisions.take()
    revisions.advance(settled=True, asked=1, done=0)
    revisions.take()
    assert revisions.advance(settled=True, asked=2, done=1)
    assert revisions.applied == first


def test_a_revision_is_not_applied_while_a_namespace_lacks_it() -> None:
    revisions = Revisions(0.001)
    revisions.take()
    assert not revisions.advance(settled=False, asked=0, done=0)
    assert revisions.applied == 0


# --------------------------------------------------------------------------- what is asked about


def test_what_is_wanted_now_is_applied_when_the_newest_revision_is() -> None:
    assert judged(status(DONE, standing("blue")), Question()).done
    behind = Revision(wanted=8, applied=7, checked=True, unapplied={"blue": "failing: no"})
    verdict = judged(status(behind), Question())
    assert not verdict.done
    assert verdict.revision == 8
    assert verdict.waiting == ("namespace blue: failing: no",)


def test_an_earlier_revision_is_applied_with_a_later_one() -> None:
    later = Revision(wanted=9, applied=8, checked=True, unapplied={"blue": "not checked yet"})
    assert judged(status(later), Question(revision=8)).done
    assert not judged(status(later), Question(revision=9)).done
    assert judged(status(DONE), Question(revision=3)).done  # also one of an earlier run


def test_a_revision_that_was_never_taken_is_not_applied() -> None:
    verdict = judged(status(DONE), Question(revision=8))
    assert verdict.waiting == ("revision 8 is not taken yet; the newest is 7",)


def test_a_namespace_made_anew_is_not_applied_although_the_revision_was() -> None:
    anew = Revision(wanted=7, applied=7, checked=True, unapplied={"blue": "not checked yet"})
    assert not judged(status(anew), Question()).done


def test_nothing_is_applied_before_manifests_were_read() -> None:
    assert not judged(status(Revision()), Question()).done
    assert not judged(status(Revision()), of("a.yaml", A)).done


def test_a_file_is_applied_when_the_daemon_has_read_just_that() -> None:
    stands = status(DONE, standing("blue"), standing("red"))
    assert judged(stands, of("a.yaml", A)).done
    assert judged(stands, of("a.yaml", B)).waiting == (
        "the daemon has read another version of a.yaml",
    )
    assert judged(stands, of("c.yaml", A)).waiting == ("the daemon has not read c.yaml",)


def test_a_file_waits_for_its_own_namespaces_and_not_for_others() -> None:
    blocked = Revision(
        wanted=7, applied=6, checked=True, files=FILES, unapplied={"red": "failing: no"}
    )
    stands = status(blocked, standing("blue"), standing("red", State.FAILING, "no"))
    assert judged(stands, of("a.yaml", A)).done
    assert not judged(stands, of("b.yaml", B)).done


def test_a_file_waits_for_flows_and_for_what_is_to_be_cleared() -> None:
    stands = (standing("blue"), standing("red"), standing("old"))
    for more in (
        {"unflushed": frozenset({"blue"})},
        {"unflushed": frozenset({"gone"})},  # which was cleared, and not yet of its flows
        {"unapplied": {"old": "its rules are not removed yet"}, "leaving": frozenset({"old"})},
    ):
        revision = Revision(wanted=7, applied=6, checked=True, files=FILES, **more)
        assert not judged(status(revision, *stands), of("a.yaml", A)).done
    other = Revision(wanted=7, applied=6, checked=True, files=FILES, unflushed=frozenset({"red"}))
    assert judged(status(other, *stands), of("a.yaml", A)).done


def test_a_file_whose_namespace_does_not_exist_is_not_applied() -> None:
    verdict = judged(status(DONE, standing("blue", State.PENDING, "no such")), of("a.yaml", A))
    assert verdict.waiting == ("namespace blue is pending: no such",)
    assert judged(status(DONE, standing("blue", State.PENDING, "no such")), Question()).done


def test_a_file_with_policies_waits_for_every_namespace() -> None:
    files = {"/etc/m/p.yaml": Taken(sha256=A, namespaces=None)}
    revision = Revision(wanted=7, checked=True, files=files, unapplied={"red": "failing: no"})
    assert not judged(status(revision, standing("red")), of("p.yaml", A)).done


def test_a_file_is_not_applied_before_namespaces_were_compared() -> None:
    taken = Revision(wanted=8, applied=7, files=FILES)
    assert judged(status(taken, standing("blue")), of("a.yaml", A)).waiting == (
        "revision 8 is being applied",
    )


def test_a_file_that_the_daemon_rejects_is_answered_with_its_problems() -> None:
    wrong = Problem(code="x", path=(), what="is wrong", fix="Mend it.", file="/etc/m/a.yaml")
    stands = status(DONE, standing("blue"), standing("red"), problems=(wrong,))
    assert judged(stands, of("a.yaml", A)).rejected == (str(wrong),)
    assert judged(stands, of("b.yaml", B)).done


def test_a_directory_is_applied_when_all_of_it_is_and_nothing_else() -> None:
    stands = status(DONE, standing("blue"), standing("red"))
    both = combined([("b.yaml", B), ("a.yaml", A)])
    assert judged(stands, Question(directory=both)).done
    assert not judged(stands, Question(directory=combined([("a.yaml", A)]))).done


def test_services_wait_for_the_node() -> None:
    files = {"/etc/m/s.yaml": Taken(sha256=A, namespaces=frozenset({NODE}))}
    revision = Revision(wanted=7, checked=True, files=files, unapplied={NODE: "not checked yet"})
    assert not judged(status(revision, standing(NODE)), of("s.yaml", A)).done


def test_ports_of_its_services_that_are_refused_are_told_with_a_file() -> None:
    own = Taken(sha256=A, namespaces=frozenset({NODE}), services=frozenset({"Service/x/web"}))
    other = Taken(sha256=B, namespaces=frozenset({NODE}), services=frozenset({"Service/x/we"}))
    files = {"/etc/m/a.yaml": own, "/etc/m/b.yaml": other}
    here = standing(NODE, State.CONFLICT, "some")
    here = replace(here, refused=(Pending("Service/x/web/http", "tcp 80 is taken"),))
    stands = status(replace(DONE, files=files), here)
    verdict = judged(stands, of("a.yaml", A))
    assert (verdict.done, verdict.refused) == (True, ("Service/x/web/http: tcp 80 is taken",))
    assert judged(stands, of("b.yaml", B)).refused == ()


def test_files_cannot_be_asked_about_where_manifests_come_from_an_api_server() -> None:
    cluster = Revision(wanted=7, applied=7, checked=True)
    assert "not from files" in judged(status(cluster), of("a.yaml", A)).unsupported


@pytest.mark.parametrize(
    "query", ["revision=x", "timeout=-1", "timeout=61", "timeout=nan", "what=1", "revision"]
)
def test_a_question_that_makes_no_sense_is_refused(query: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        question(query)


def test_a_question_is_read_from_a_query() -> None:
    read = question("file=a.yaml%3Aab&file=b%3Ac.yaml%3Acd&timeout=2.5&revision=7")
    assert read == Question(files=(("a.yaml", "ab"), ("b:c.yaml", "cd")), seconds=2.5, revision=7)
    assert question("") == Question()
