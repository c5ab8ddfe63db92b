"""What the kernel in memory has beside the contract: strangers, stale looks, and namespaces."""

from __future__ import annotations

import pytest

from agent.errors import NoNamespace, Stale
from agent.kernel.memory import MemoryKernel, MemoryNamespace
from rules.model import Desired, Foreign, Live, Observed, Rule, Sysctl
from rules.plan import diff
from rules.values import replace
from tests.unit.samples import POD, egress, forward

STRANGER = Foreign("prerouting", 0, "accept")


def want(*rules: Rule) -> Desired:
    return Desired(rules=frozenset(rules))


def holding(*rules: Rule) -> MemoryNamespace:
    namespace = MemoryNamespace(POD)
    if rules:
        namespace.commit(diff("blue", want(*rules), namespace.observe()))
    return namespace


def test_a_strangers_rule_gets_a_handle_of_its_own() -> None:
    namespace = holding(forward())
    namespace.insert(STRANGER)
    namespace.insert(egress())
    observed = namespace.observe()
    old: list[Live | Foreign] = [*observed.live, *observed.foreign]
    assert len({one.handle for one in old}) == 3


def test_a_setting_that_nobody_made_is_zero() -> None:
    assert holding().observe(["net.ipv4.ip_forward"]).sysctls == {"net.ipv4.ip_forward": "0"}


def test_a_setting_is_as_it_was_last_made() -> None:
    namespace = holding()
    name = "net.ipv4.ip_forward"
    desired = Desired(rules=frozenset({egress()}), sysctls=frozenset({Sysctl(name, "1")}))
    namespace.commit(diff("blue", desired, namespace.observe([name])))
    assert namespace.observe([name]).sysctls == {name: "1"}


def test_a_refused_commit_changes_nothing() -> None:
    namespace = holding(forward("tcp 22"))
    seen = namespace.observe()
    namespace.commit(diff("blue", want(forward("tcp 22-23")), seen))
    before = namespace.observe(["a"])
    late = Desired(rules=frozenset({egress()}), sysctls=frozenset({Sysctl("a", "1")}))
    with pytest.raises(Stale, match="a rule went"):
        namespace.commit(diff("blue", late, seen))
    assert namespace.observe(["a"]) == before


@pytest.mark.parametrize(
    ("held", "seen"),
    [
        pytest.param(holding(forward()), Observed(), id="came"),
        pytest.param(holding(), holding(forward()).observe(), id="went"),
    ],
)
def test_a_commit_to_a_table_that_meanwhile(held: MemoryNamespace, seen: Observed) -> None:
    with pytest.raises(Stale, match="came or went"):
        held.commit(diff("blue", want(egress()), seen))


def test_a_table_that_went_cannot_be_deleted() -> None:
    seen = holding(forward()).observe()
    with pytest.raises(Stale, match="came or went"):
        holding().commit(diff("blue", want(), seen))


def test_a_commit_of_settings_alone_changes_no_rule() -> None:
    namespace = holding(forward())
    before = namespace.observe()
    desired = Desired(rules=frozenset({forward()}), sysctls=frozenset({Sysctl("a", "1")}))
    namespace.commit(diff("blue", desired, namespace.observe(["a"])))
    assert namespace.observe() == before
    assert namespace.settings == {"a": "1"}


def test_a_chain_that_went_is_put_back_with_its_rules_as_they_are() -> None:
    namespace = holding(forward(), egress())
    before = namespace.observe()
    namespace.held = replace(before, chains=frozenset())
    namespace.commit(diff("blue", want(forward(), egress()), namespace.observe()))
    assert namespace.observe() == before


def test_a_namespace_is_one_and_the_same_by_every_name() -> None:
    namespace, other = holding(), holding()
    assert namespace.identity == namespace.identity != other.identity


def test_closing_a_namespace_leaves_it_as_it_is() -> None:
    namespace = holding(forward())
    before = namespace.observe()
    namespace.close()
    assert namespace.observe() == before


def test_its_surroundings_are_those_it_was_given() -> None:
    assert holding().surroundings() == POD


def test_a_kernel_knows_its_namespaces_by_name() -> None:
    kernel = MemoryKernel({"red": holding(), "blue": holding(forward())})
    assert kernel.names() == ["blue", "red"]
    with kernel.opened("blue") as namespace:
        assert len(namespace.observe().live) == 1


def test_a_namespace_that_is_not_there_cannot_be_opened() -> None:
    kernel = MemoryKernel({})
    with (
        pytest.raises(NoNamespace, match="there is no network namespace blue"),
        kernel.opened("blue"),
    ):
        pass
