"""The tables of iptables as lists, as far as strategies.py has them, and what it
takes for filters: places before others, networks, and scripts for several tables."""

from __future__ import annotations

import json
from ipaddress import ip_interface
from itertools import groupby
from typing import Any

from rules.model import Family
from rules.plan import Plan
from rules.xtables import CHAINS, PREFIX, Step, steps
from tests.property.strategies import ListedChains, ListedFamilies, hook_of, placed

FLAGS = {Family.IP: "-4", Family.IP6: "-6"}


class LegacyChains(ListedChains):
    """All tables of one family."""

    def run(self, due: list[Step]) -> None:
        for step, *details in json.loads(json.dumps(due)):
            getattr(self, f"_{step}")(*placed(details))

    def _append(self, name: str, rule: dict[str, Any]) -> None:
        super()._append(name, {key: rule[key] for key in rule if key not in ("src", "dst")})
        ends = {key: str(ip_interface(rule[key])) for key in ("src", "dst") if key in rule}
        self.chains[name][-1] |= ends

    def _insert(self, name: str, place: int, rule: dict[str, Any]) -> None:
        row = self.chains[name]
        assert place < len(row), "what comes last is appended"
        self._append(name, rule)
        row.insert(place, row.pop())

    def restore(self, text: str) -> None:
        *blocks, end = text.split("COMMIT\n")
        assert end == ""
        for block in blocks:
            first, *lines = block.splitlines()
            for line in lines:
                flag, command, bare, *words = line.split(" ")
                name = f"{first.removeprefix('*')} {bare}"
                assert name in {*CHAINS, *map(hook_of, CHAINS)}
                if command == "-I" and bare.startswith(PREFIX) and flag == FLAGS[self.family]:
                    self.chains[name].insert(int(words[0]) - 1, " ".join(words[1:]))
                else:
                    super().restore(f"{first}\n{line}\nCOMMIT\n")


class LegacyFamilies(ListedFamilies):
    """Both of them, as one backend."""

    def __init__(self) -> None:
        self.families: dict[Family, ListedChains] = {one: LegacyChains(one) for one in Family}


def commits(plan: Plan, family: Family) -> list[tuple[str, list[Step]]]:
    """The steps of each commit, with its table."""
    found = groupby(steps(plan, family), key=lambda step: str(step[1]))
    return [(name, list(due)) for name, due in found]
