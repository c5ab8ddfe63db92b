"""The page of a real daemon in a real browser: what it draws, that no name on it is ever more than
a name, and that it follows what happens while somebody reads it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, browsing
from tests.daemon.publishing import publishes, publishing, service, wired
from tests.daemon.running import PATIENCE, Node, Running
from tests.nodes import Net, vm_manifest
from tests.spaces import eventually

ELSEWHERE = "chrome://"  # what the browser says of pages of its own
HOSTILE = "/nowhere/</script><svg/onload=hacked()>\"'&<b>😀" + "n" * 100


@pytest.fixture(scope="module")
def lab() -> Iterator[Net]:
    with wired() as made:
        yield made


@pytest.fixture(scope="module")
def browser(lab: Net, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all: starting it takes longer than every test."""
    with browsing(lab.node, tmp_path_factory.mktemp("browser") / "home") as made:
        yield made


@pytest.fixture
def node(lab: Net, tmp_path: Path) -> Iterator[Node]:
    with publishing(lab, tmp_path / "node") as made:
        yield made


def opened(browser: Browser, daemon: Running) -> None:
    browser.resize(1400, 1000)
    browser.complaints()
    browser.open(f"http://127.0.0.1:{daemon.port}/")
    assert browser.text("#health"), browser.text()


def complaints(browser: Browser) -> list[str]:
    return [one for one in browser.complaints() if ELSEWHERE not in one]


def bars(browser: Browser, selector: str) -> dict[str, tuple[float, float]]:
    """Where the bars of a picture begin and end on the screen, as parts of its width."""
    found = browser.run(
        """
        const svg = document.querySelector(arguments[0]), all = svg.getBoundingClientRect();
        return [...svg.querySelectorAll("rect")].map((bar) => {
          const box = bar.getBBox();
          return [bar.textContent, box.x / all.width, (box.x + box.width) / all.width];
        });
        """,
        f"{selector} svg.axis",
    )
    return {title.partition(":")[0].strip(): (first, last) for title, first, last in found}


def ports(first: int, last: int, begin: int = 1, end: int = 65535) -> tuple[float, float]:
    size = end - begin + 1
    return (first - begin) / size, (last - begin + 1) / size


def row(browser: Browser, netns: str) -> str:
    """The row of a namespace, as a selector."""
    found = browser.run(
        "return [...document.querySelectorAll('article')].find("
        "(one) => one.querySelector('h3 bdi').textContent === arguments[0])?.id",
        netns,
    )
    return f"#{found}"


def icon(browser: Browser) -> str:
    """The colour that the tab has."""
    href = str(browser.run("return document.getElementById('icon').getAttribute('href')"))
    return href.partition("fill=")[2]


def look_again(browser: Browser) -> None:
    """As who comes back to the tab, rather than wait for the next time."""
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")


def test_ranges_and_bands_are_drawn_where_they_are_on_every_screen(
    lab: Net, node: Node, browser: Browser, tmp_path: Path
) -> None:
    node.save("a.yaml", service("a", 5000, count=100, protocol="UDP", at=30001))
    node.save("b.yaml", service("b", 5200, count=500))
    with node.running() as daemon:
        given = publishes(daemon, "a", "b")
        opened(browser, daemon)
        pod, static, dynamic = row(browser, lab.vms[0].pod), "#band-static", "#band-dynamic"
        for width, dark in ((1400, False), (360, False), (1400, True)):
            browser.resize(width, 900, dark=dark)
            drawn = bars(browser, pod)
            assert set(drawn) == {
                *(f"tcp {one}" for one in (80, 443, "5000-5999", 30100)),
                "udp 5000-5999",
            }
            assert drawn["tcp 5000-5999"] == pytest.approx(ports(5000, 5999), abs=0.001)
            assert drawn["tcp 443"] == pytest.approx(ports(443, 443), abs=0.001)
            assert list(bars(browser, static).values()) == [
                pytest.approx(ports(30001, 30085, 30000, 30085), abs=0.005)
            ]
            assert pytest.approx(
                ports(given["b"].first, given["b"].last, 30086, 32767), abs=0.005
            ) in list(bars(browser, dynamic).values())
            wide = browser.run("return document.documentElement.scrollWidth")
            assert wide <= width, "it has to be scrolled sideways"
            path = browser.picture(tmp_path / f"{width}{'-dark' if dark else ''}.png")
            assert path.stat().st_size > 10_000
        assert "85 of 86 taken" in browser.text(static)
        assert browser.text("#health") == "Ready"
        assert "Reload" not in browser.text()
        assert [one["ports"] for one in daemon.status()["node_ports"]["held"]] == [
            "30001-30100",
            str(given["b"]),
        ]
        assert complaints(browser) == []


def test_many_ports_between_free_ones_are_hatched_under_the_policy_of_the_page(
    lab: Net, node: Node, browser: Browser
) -> None:
    many = range(1000, 21000, 60)
    node.save("vm.yaml", vm_manifest(lab.vms[0], ",".join(map(str, [*many, "40000-50000"]))))
    with node.running() as daemon:
        assert daemon.applied()
        assert len(daemon.standing(lab.vms[0].pod)["ranges"]) >= len(many)
        opened(browser, daemon)
        pod = row(browser, lab.vms[0].pod)
        *joined, last = bars(browser, pod)
        assert last == "tcp 40000-50000"
        ranges = [int(title.split()[0]) for title in joined]
        assert sum(ranges) == len(many)
        assert 1 < len(ranges) < 20
        fills = browser.run(
            "return [...document.querySelectorAll(arguments[0])]"
            ".map((bar) => getComputedStyle(bar).fill)",
            f"{pod} rect",
        )
        assert [fill.startswith('url("#hatch")') for fill in fills] == [True] * len(joined) + [
            False
        ]
        assert "too close to be drawn one by one" in browser.text("#namespaces .legend")
        assert complaints(browser) == []


def test_hostile_names_are_shown_as_they_are_and_do_nothing(
    lab: Net, node: Node, browser: Browser, tmp_path: Path
) -> None:
    stranger = tmp_path / "<img src=x on=>"  # 15 letters: what the kernel keeps of it
    shutil.copy(shutil.which("nft") or "", stranger)
    bad = vm_manifest(lab.vms[0], "22").replace("name: vm1,", "name: '\"><i onclick=hacked()>',")
    node.save("<img src=x onerror=hacked()>.yaml", bad)
    node.save("rtl.yaml", bad.replace('">', '"\N{RIGHT-TO-LEFT OVERRIDE}>'))
    away = vm_manifest(lab.vms[0], "22").replace("name: vm1", "name: vm2")
    quoted = HOSTILE.replace("'", "''")
    node.save("away.yaml", away.replace(lab.vms[0].pod, f"'{quoted}'"))
    with node.running() as daemon:
        pod = lab.vms[0].pod
        assert daemon.applied()
        words = ("ip", "netns", "exec", pod, str(stranger), "flush", "ruleset")
        subprocess.run(words, check=True, timeout=PATIENCE)
        assert eventually(lambda: bool(daemon.standing(pod)["last_drift"]))
        opened(browser, daemon)
        text = browser.text()
        assert "Drift" in browser.text(row(browser, pod))
        assert "<img src=x on=> (pid " in browser.text(row(browser, pod))
        assert "</script><svg/onload=hacked()>\"'&<b>😀nnn" in text
        assert "/<img src=x onerror=hacked()>.yaml:3" in text
        assert "it is '\"><i onclick=hacked()>'" in text
        assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in text
        assert browser.run("return typeof hacked") == "undefined"
        strange = "main img, main script, main i, main b, main svg[onload], [onclick], [onerror]"
        assert browser.run("return document.querySelectorAll(arguments[0]).length", strange) == 0
        assert complaints(browser) == []


def test_what_happens_meanwhile_is_shown_and_what_is_read_stays_as_it_is(
    lab: Net, node: Node, browser: Browser
) -> None:
    with node.running() as daemon:
        assert daemon.applied()
        opened(browser, daemon)
        article = row(browser, lab.vms[0].pod)
        browser.run(
            """
            window.before = document.querySelector(arguments[0]);
            const details = before.querySelector("details");
            details.open = true;
            details.querySelector("summary").focus();
            document.body.style.minHeight = "5000px";
            scrollTo(0, 77);
            window.place = before.getBoundingClientRect().top;
            """,
            article,
        )
        node.save("vm.yaml", vm_manifest(lab.vms[0], "7000-7999"))
        node.save("other.yaml", vm_manifest(lab.vms[0], "x").replace("vm1", "vm2"))
        assert daemon.forwarded(lab.vms[0].pod) == {"tcp 7000-7999"}
        assert eventually(lambda: set(bars(browser, article)) == {"tcp 7000-7999"})
        assert browser.run(
            """
            const now = document.querySelector(arguments[0]);
            const details = now.querySelector("details");
            return [now === before, details.open,
                    document.activeElement === details.querySelector("summary"),
                    Math.abs(now.getBoundingClientRect().top - place) < 3];
            """,
            article,
        ) == [True, True, True, True]
        assert "7000-7999" in browser.text(f"{article} tbody")
        assert "other.yaml" in browser.text("#attention")
        node.remove("other.yaml")
        assert daemon.applied()
        assert not daemon.status()["problems"]
        look_again(browser)
        assert eventually(lambda: browser.text("#attention") == "")
        assert browser.run("return document.querySelector(arguments[0]) === before", article)
        assert complaints(browser) == []
        assert browser.run("return document.title").startswith("Ready · ")
        colour = icon(browser)
        node.configure(listen=f"127.0.0.1:{daemon.port}")
        daemon.stop()
    look_again(browser)
    assert browser.shows("The daemon has not answered since")
    assert browser.run("return document.title").startswith("No answer · ")
    assert icon(browser) != colour
    assert "7000-7999" in browser.text(f"{article} tbody")
    with node.running():
        look_again(browser)
        assert eventually(lambda: "has not answered" not in browser.text())
        assert browser.run("return document.title").startswith("Ready · ")
        assert icon(browser) == colour
        assert browser.text("#health") == "Ready"


def test_without_scripts_all_of_it_is_there(lab: Net, node: Node, browser: Browser) -> None:
    node.save("a.yaml", service("a", 80, at=30001))
    with node.running() as daemon:
        publishes(daemon, "a")
        browser.allow_scripts(False)
        try:
            opened(browser, daemon)
            page = browser.command("Page.captureSnapshot", format="mhtml")["data"]
            text = browser.text()
        finally:
            browser.allow_scripts(True)
        assert "Reload" in text  # which is only for who runs none
        assert lab.vms[0].pod in text
        assert "1 of 86 taken" in text
        assert "/metrics" in text
        assert "svg" in page


def test_a_name_that_was_pointed_here_by_somebody_else_leads_nowhere(
    lab: Net, node: Node, browser: Browser
) -> None:
    with node.running() as daemon:
        opened(browser, daemon)
        port = daemon.port
        # Every name below localhost is loopback to a browser, as a rebound one would be.
        browser.open(f"http://rebound.localhost:{port}/")
        assert "ask for localhost" in browser.text()
        assert lab.vms[0].pod not in browser.text()
        browser.open(f"http://localhost:{port}/")
        assert browser.text("#health") == "Ready"
