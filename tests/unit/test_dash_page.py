"""The page of `kit dash` in a real browser: live, quiet, narrow, dark, and for those who hear it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import axe
import browser
import pytest
from dash_cluster import WAIT, Played, PlayedRank, death, gone, served, two_nodes

pytestmark = pytest.mark.full
LISTEN = """
window.kept = document.querySelector('details'); kept.open = true; kept.querySelector('summary').focus();
window.heard = []; const news = document.querySelector('#news');
const watched = {childList: true, characterData: true, subtree: true};
new MutationObserver(() => heard.push(news.innerText)).observe(news, watched);
"""  # opens and focuses something, and notes what a screen reader would read out


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    if browser.program() is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with browser.opened(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe.script(tmp_path_factory.mktemp("axe"))


def dying() -> Played:
    """Much at once: a rank that waits, a node that does not answer, a death, receipts, the speed of before."""
    played = two_nodes()
    played.nodes["node1"] += [PlayedRank(0, ranks=1, deployment="demo-moe"), PlayedRank(0, ranks=1, deployment="left")]
    played.nodes["node1"][0].state, played.nodes["node1"][0].death = "waiting", death()
    played.nodes["node1"][2].engine, played.nodes["node1"][2].death = "exited", death("a" * 300)
    played.errors["node2"] = gone("node2")
    return played


def show(tab: browser.Page, address: str, width: int = 1280, *, phone: bool = False, dark: bool = False) -> None:
    """Open the page and wait until it is live; complaints of the page before it are forgotten."""
    tab.open("about:blank", width, 800, phone=phone, dark=dark)
    tab.complaints.clear()
    tab.open(address, width, 800, phone=phone, dark=dark)
    tab.wait_for("document.querySelector('#link').innerText === 'live'")


def text(tab: browser.Page) -> str:
    return str(tab.value("document.querySelector('main').innerText"))


def test_changes_arrive_by_themselves_and_leave_the_rest_alone(tab: browser.Page) -> None:
    played = two_nodes()
    bench = Path("docs/receipts")
    with served(played, bench=bench) as server:
        show(tab, server.address)
        tab.wait_for("document.querySelector('polyline') !== null")
        assert "rank 1 on node2 serving" in text(tab) and "kit bench prefill: demo-tp2" in text(tab)
        tab.value(LISTEN)
        before = tab.value("document.querySelector('time').innerText")
        tab.wait_for(f"document.querySelector('time').innerText !== '{before}'")
        assert tab.value("heard.length") == 0, "figures that change must not be read out"
        played.nodes["node2"][0] = PlayedRank(1, engine="exited", death=death())
        tab.wait_for("document.querySelector('main').innerText.includes('worker TP1 ended with signal SIGKILL')")
        assert tab.value("heard") == ["demo-tp2: partial."]
        assert tab.value("kept.isConnected && kept.open && document.activeElement === kept.querySelector('summary')")
        played.nodes["node1"].clear()
        played.nodes["node2"].clear()
        tab.wait_for("document.querySelector('main').innerText.includes('Nothing of the kit stands')")
        assert tab.complaints == []
    tab.wait_for("document.querySelector('#link').innerText.includes('does not answer')")


def test_a_page_that_nobody_sees_asks_nothing_and_goes_on_when_it_is_seen_again(tab: browser.Page) -> None:
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});" \
           "document.dispatchEvent(new Event('visibilitychange'))"  # fmt: skip
    played = two_nodes()
    with served(played) as server:
        show(tab, server.address)
        tab.value(hide % "true")
        assert tab.value("document.querySelector('#link').innerText") == "paused"
        deadline, quiet = time.monotonic() + WAIT, False
        while not quiet and time.monotonic() < deadline:
            before = played.asked
            time.sleep(0.5)
            quiet = played.asked == before
        assert quiet
        tab.value(hide % "false")
        tab.wait_for("document.querySelector('#link').innerText === 'live'")
        assert played.asked > before


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "phone"), [(360, True), (1280, False)])
@pytest.mark.parametrize("played", [two_nodes, dying, lambda: Played({"node1": []})], ids=["fine", "dying", "empty"])
def test_it_is_readable_and_accessible(
    tab: browser.Page, checker: str, width: int, phone: bool, dark: bool, played: type[Played], tmp_path: Path
) -> None:
    with served(played(), bench=Path("docs/receipts")) as server:
        show(tab, server.address, width, phone=phone, dark=dark)
        tab.value("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert tab.value("document.documentElement.scrollWidth") <= width
        small = "[...document.querySelectorAll('main *')].map(x => parseFloat(getComputedStyle(x).fontSize))"
        assert min(tab.value(small)) >= 13
        assert axe.violations(tab, checker) == []
        paper = tab.value("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") != dark
        assert tab.complaints == []
        tab.screenshot(tmp_path / "page.png", whole=True)
        assert (tmp_path / "page.png").stat().st_size > 20_000


def test_the_checker_finds_what_is_wrong(tab: browser.Page, checker: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<p style='color:#ccc'>pale</p><img src='data:,'><button></button>" + "<p>more</p>" * 20)
    tab.open(broken, 360, 740, phone=False)
    found = axe.violations(tab, checker)
    assert {one.partition(":")[0] for one in found} >= {"color-contrast", "image-alt", "button-name", "region"}
