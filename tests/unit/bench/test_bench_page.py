"""The report: what it says is drawn from the observations anew, and a real browser shows it, on a phone too."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import axe
import browser
import pytest
from arena import quiet
from PIL import Image

from exl3kit.bench import ab, charts, paced, records, report
from exl3kit.bench.ab import Question
from exl3kit.bench.places import Here
from exl3kit.bench.records import Recorder
from exl3kit.bench.targets import Target
from exl3kit.errors import KitError

CHARTS = {"boots-32", "boots-64", "effect"}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short A-B-A campaign on servers of this process; B is half as fast."""
    folder = tmp_path_factory.mktemp("campaign") / "receipts"
    question = Question(rungs=(32, 64), count=5, boots=3, max_cv=9.0)
    seeds = itertools.count()

    @contextmanager
    def opener(arm: str) -> Iterator[Target]:
        with paced.running(paced.Pace(rate=3000 if arm == "A" else 1000), next(seeds)) as url:
            yield Target(Here(url))

    recorder = Recorder(folder)
    recorder.begin("ab", question.as_json())
    ab.run(question, opener, recorder, quiet())
    recorder.close()
    return folder


def test_the_page_says_what_the_observations_say(campaign: Path, tmp_path: Path) -> None:
    view, files = report.write(records.read(campaign), tmp_path)
    page = files[0].read_text()
    assert view.valid and f'data-verdict="{view.verdict}"' in page
    assert "All 39 observations" in page and "3 planted cache hit(s), 3 refused" in page
    assert set(re.findall(r'data-chart="([\w-]+)"', page)) == CHARTS == {path.stem for path in files[1:]}
    assert page.count("<circle") == 30 + 2  # every sample that counts, and one dot per effect
    assert not re.search(r"<script|https?://(?!www\.w3\.org/2000/svg)|<link[^>]+href=\"(?!data:)", page)


def test_a_conclusion_that_was_written_down_is_not_believed(campaign: Path, tmp_path: Path) -> None:
    """Given receipts whose result was changed by hand, and a row that hit the cache, then the page says invalid."""
    lines = [json.loads(line) for line in (campaign / records.FILE).read_text().splitlines()]
    sample = next(one for one in lines if one["record"] == "observation" and not one["step"].get("warmup"))
    sample["requests"][0]["usage"]["prompt_tokens_details"]["cached_tokens"] = 16
    (tmp_path / records.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    view, files = report.write(records.read(tmp_path), tmp_path)
    assert view.verdict == "invalid" and "cached_tokens" in files[0].read_text()


def test_two_days_stand_side_by_side_and_claim_nothing(campaign: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (campaign / records.FILE).read_text().splitlines()]
    for line in lines:
        if line["record"] == "boot":
            line["environment"]["kernel"] = "another"
    (tmp_path / records.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.write(records.read(campaign), tmp_path / "page", records.read(tmp_path))
    page = (tmp_path / "page" / report.PAGE).read_text()
    assert "Beside an earlier day" in page and "days apart prove no effect" in page
    assert "kernel" in page and "another" in page


def test_pictures_are_pictures(campaign: Path, tmp_path: Path) -> None:
    _, files = report.write(records.read(campaign), tmp_path)
    for path in files[1:]:
        with Image.open(path) as image:
            assert image.size == (charts.WIDTH * 3, charts.HEIGHT * 3)
            assert len(image.getcolors(1 << 20) or ()) > 20  # lines, dots and smoothed words, not an empty frame


@pytest.mark.parametrize("text", ["", "{}\n", '{"record": "campaign", "schema": 7}\n', '{"record": "moon"}\n', "torn"])
def test_what_are_no_receipts_is_refused_with_eight(text: str, tmp_path: Path) -> None:
    (tmp_path / records.FILE).write_text(text)
    with pytest.raises(KitError) as refused:
        records.read(tmp_path)
    assert refused.value.code == 8


def test_receipts_are_never_written_over(campaign: Path) -> None:
    with pytest.raises(KitError, match="cannot be written"):
        Recorder(campaign)


@pytest.mark.full
def test_the_page_is_accessible(campaign: Path, tmp_path: Path) -> None:
    """Given axe with all its rules and every table open, then it finds nothing, on a phone neither."""
    if browser.program() is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    page, checker = report.write(records.read(campaign), tmp_path / "page")[1][0], axe.script(tmp_path)
    with browser.opened(tmp_path / "profile") as tab:
        for width, height, phone in ((360, 740, True), (1280, 900, False)):
            tab.open(page, width, height, phone=phone)
            tab.value("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert axe.violations(tab, checker) == []
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)


@pytest.mark.full
def test_a_browser_shows_every_plot_without_complaint_also_on_a_phone(campaign: Path, tmp_path: Path) -> None:
    if browser.program() is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    page = report.write(records.read(campaign), tmp_path / "page")[1][0]
    with browser.opened(tmp_path / "profile") as tab:
        for width, height, phone in ((360, 740, True), (1280, 900, False)):
            tab.open(page, width, height, phone=phone)
            # every plot is there and as large as its place, and nothing sticks out to the side
            drawn = tab.value(
                "[...document.querySelectorAll('svg[data-chart]')].map(x => x.getBoundingClientRect().width)"
            )
            assert len(drawn) == len(CHARTS) and all(300 <= size <= width for size in drawn)
            assert tab.value("document.documentElement.scrollWidth") <= width
            # words are large enough to read
            sizes = tab.value("[...document.querySelectorAll('svg text')].map(x => x.getBoundingClientRect().height)")
            assert min(sizes) >= 9
            body = tab.value("getComputedStyle(document.body).fontSize")
            assert float(body.removesuffix("px")) >= 14
            tab.screenshot(tmp_path / f"{width}.png", whole=True)
            assert (tmp_path / f"{width}.png").stat().st_size > 20_000
        tab.value("document.querySelector('details').open = true")
        assert tab.value("document.querySelectorAll('details table tr').length") > 39
        assert tab.complaints == []
        # the check itself can fail
        broken = tmp_path / "broken.html"
        broken.write_text("<script>console.error('no')</script><div style='width:900px'>wide</div>")
        tab.open(broken, 360, 740, phone=False)
        assert tab.complaints and tab.value("document.documentElement.scrollWidth") > 360
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)
