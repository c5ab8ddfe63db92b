"""The machine whose ports are forwarded wherever something is measured in process."""

from collections.abc import Iterable

from rules.model import Claim, Guest, Machine, Masquerade


def machine(claims: Iterable[Claim], guests: Iterable[Guest]) -> Machine:
    """One that claims these ports for a guest at these addresses."""
    masquerade = Masquerade(name="red", entry=None, guests=tuple(guests), claims=tuple(claims))
    return Machine(
        kind="VirtualMachine",
        namespace="default",
        name="bench",
        netns="bench",
        masquerade=masquerade,
    )
