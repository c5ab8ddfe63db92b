"""The table of `make bench-peers`: what was not measured is neither hidden nor made up."""

from bench.peers.report import Row, as_json, lines

DONE = Row(
    name="nft -f",
    how="one rule per range",
    set_up=4.567,
    change=17.4,
    remove=1234.5,
    measured=((4.5, 4.6), (17.0, 18.0), (1234.0, 1235.0)),
    rules=2,
    flow=1.5,
    shifted="NO: all at 7000",
    flushed="gone",
    left_open="stays open",
)
SAMPLED = Row(
    name="portmap",
    set_up=410000.0,
    change=None,
    remove=250.0,
    rules=42000,
    sample=50,
    measured=((1.0,),),
)
MISSING = Row(name="podman", reason="not installed: podman")


def cells(text: str) -> list[str]:
    return [cell.strip() for cell in text.strip("|").split("|")]


def test_numbers_are_as_exact_as_they_are_worth() -> None:
    assert cells(lines([DONE], ["a machine"])[2]) == [
        *("nft -f", "4.57", "17", "1,234", "2", "1.50", "-"),
        *("NO: all at 7000", "gone", "stays open"),
    ]


def test_what_is_extrapolated_says_so() -> None:
    made = lines([SAMPLED], ["a machine"])
    assert cells(made[2])[1:5] == ["~410,000", "-", "≥250", "~42,000"]
    assert "- portmap: 50 ports of each protocol measured; 1 round" in made


def test_a_missing_peer_is_named_with_its_reason_and_has_no_row() -> None:
    made = lines([DONE, MISSING], ["a machine"])
    assert "- podman: not installed: podman" in made
    assert not any(line.startswith("| podman") for line in made)
    assert as_json([DONE, MISSING], ["a machine"])["peers"][1]["reason"] == MISSING.reason  # type: ignore[index]


def test_all_lines_of_the_table_are_as_wide_as_each_other() -> None:
    table = [line for line in lines([DONE, SAMPLED], []) if line.startswith("|")]
    assert len(table) == 4
    assert len({len(line) for line in table}) == 1
