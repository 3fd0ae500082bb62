"""The report page in a real browser: Chromium, driven by Playwright.

A test is skipped if one of the two is missing. Chromium is looked for on PATH and in
RLSYS_CHROMIUM; `apt-get install chromium` and `pip install playwright` bring them.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlsys.report import write_report
from rlsys.report.live_page import ReportServer
from rlsys.runs.run_directory import RunDirectory
from tests.report.synthetic_runs import Episode, SyntheticRun, write_run
from tests.tiers import rest_slow

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect  # waits for the page, which acts on some events later

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("RLSYS_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SECTIONS = [
    "overview",
    "reward",
    "stability",
    "time",
    "groups",
    "ledger",
    "events",
    "configuration",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH or in RLSYS_CHROMIUM")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


class Opened:
    """A page that is shown, with everything that must not happen in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.faults: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("dialog", self._dismiss)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", self._log)

    def _dismiss(self, dialog: Any) -> None:
        self.faults.append("dialog")
        dialog.dismiss()

    def _log(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text}")

    def go(self, url: str) -> None:
        self.page.goto(url)
        self.page.wait_for_selector("main[aria-busy=false]")

    @property
    def foreign(self) -> list[str]:
        """Requests for anything but the page itself and data in it."""
        return [url for url in self.requests[1:] if not url.startswith("data:")]

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())

    def first_paint_ms(self) -> float:
        paints = self.page.evaluate("performance.getEntriesByType('paint').map(e => e.startTime)")
        return float(max(paints))


@contextmanager
def opened(browser: Any, url: str, **context: Any) -> Iterator[Opened]:
    """Open a page, and assert at the end that no script failed and nothing was fetched."""
    made = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
    shown = Opened(made.new_page())
    shown.go(url)
    yield shown
    made.close()
    assert shown.faults == []
    assert shown.foreign == []


def test_a_small_run(browser: Any, tmp_path: Path) -> None:
    run = SyntheticRun(
        evaluations=lambda step: 0.3 + step / 200,
        shape=lambda step, line: {"completion/truncated_frac": 0.5},
    )
    page = write_report([write_run(tmp_path / "first", run)])
    with opened(browser, page.as_uri()) as shown:
        ids = [
            section.get_attribute("id") for section in shown.page.locator("main > section").all()
        ]
        assert ids == SECTIONS
        assert shown.text("h1") == "first"
        assert shown.text(".state") == "finished"
        (advisory,) = shown.page.locator(".advisories > li").all()
        assert advisory.get_attribute("data-kind") == "truncated"
        for section in ("reward", "stability"):
            shown.page.locator(f"#{section} canvas").first.wait_for()
        expect(shown.page.locator("#reward canvas")).to_have_count(2)
        expect(shown.page.locator("#stability canvas")).to_have_count(6)

        # Numbers for screen readers: closed until they are asked for.
        numbers = shown.page.locator("#stability figure details").first
        expect(numbers.locator("table")).to_have_count(0)
        numbers.locator("summary").click()
        expect(numbers.locator("tbody tr")).to_have_count(30)

        # The groups, by keyboard.
        shown.page.locator("#groups thead button", has_text="step").focus()
        shown.page.keyboard.press("Enter")
        assert shown.page.locator("#groups th[aria-sort=ascending]").inner_text().startswith("step")
        first = shown.page.locator("#groups tbody tr").first
        assert first.locator("td").first.inner_text() == "1"
        first.locator("button").focus()
        shown.page.keyboard.press("Enter")
        assert "Step 1, group 0" in shown.text("#groups .group h3")
        expect(shown.page.locator("#groups .card")).to_have_count(4)
        tokens = shown.page.locator("#groups .card").first.locator(".token")
        expect(tokens).to_have_count(3)
        shown.page.locator("#groups .group select").select_option("gap")
        colours = [one.evaluate("node => node.style.background") for one in tokens.all()]
        assert len({*colours}) == 3  # negative, zero and positive gaps

        # A chart and the timeline, by keyboard.
        plot = shown.page.locator("#reward .plot").first
        plot.focus()
        shown.page.keyboard.press("Home")
        value = plot.locator(".u-legend .u-value").first
        expect(value).to_have_text("0")  # the first evaluation
        shown.page.keyboard.press("ArrowRight")
        expect(value).to_have_text("1")
        shown.page.locator("#time canvas").focus()
        before = shown.text("#time .status")
        shown.page.keyboard.press("+")
        expect(shown.page.locator("#time .status")).not_to_have_text(before)

        assert shown.text("#ledger .losses") == "\u2212 1 stale"
        shown.page.locator("#configuration input").check()
        assert shown.page.locator("#configuration tr").count() > 60


LONG_NAME = "a-run-with-a-name-of-more-than-one-hundred-characters-without-any-space-" * 2


@pytest.mark.parametrize("scheme", rest_slow(["light", "dark"]))
def test_the_page_fits_every_window_in_either_scheme(
    browser: Any, scheme: str, tmp_path: Path
) -> None:
    runs = [
        write_run(
            tmp_path / name,
            SyntheticRun(num_steps=20, seed=i, evaluations=lambda step: 0.5, changes={"seed": i}),
        )
        for i, name in enumerate(("run", LONG_NAME))
    ]
    page = write_report(runs, tmp_path / "both.html")
    with opened(browser, page.as_uri(), color_scheme=scheme) as shown:
        shown.page.locator("#stability canvas").last.wait_for()
        for width in (320, 360, 560, 768, 1024, 1200, 1280, 1920):
            shown.page.set_viewport_size({"width": width, "height": 740})
            shown.page.wait_for_function(CHARTS_FIT)
            assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
        color = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, color[4:-1].split(",")))
        assert (brightness > 600) == (scheme == "light")


# Charts follow the size of the window a moment later.
CHARTS_FIT = """() => [...document.querySelectorAll('.plot canvas')].every(
    canvas => canvas.offsetWidth <= canvas.closest('.plot').clientWidth)"""

HOSTILE = (
    "</script><script>document.title='taken'</script>"
    "<img src='http://127.0.0.1:9/x.png' onerror='document.title=\"taken\"'>"
    "<style>@import 'http://127.0.0.1:9/x.css'</style>"
    "<svg onload=alert(1)><a href='javascript:alert(1)'>x</a>"
    "\u2028\u202e&lt;b&gt;{{7*7}}${7*7}\ud800\0"
)


@pytest.mark.slow
def test_hostile_text_runs_no_script_and_fetches_nothing(browser: Any, tmp_path: Path) -> None:
    turns = [
        {"branch": 0, "role": HOSTILE, "text": HOSTILE, "sampled": False, "seat": HOSTILE},
        {"branch": 1, "role": "assistant", "text": HOSTILE, "sampled": True},
    ]
    episode = Episode(prompt=lambda g: HOSTILE, completion=lambda g, i: HOSTILE, turns=turns)
    plain = Episode(prompt=lambda g: HOSTILE, completion=lambda g, i: HOSTILE)
    for number, one in enumerate((episode, plain)):
        run = SyntheticRun(
            num_steps=6,
            episode=one,
            outcome="failed",
            reason=HOSTILE,
            shape=lambda step, line: {f"own/{HOSTILE}": 1.0},
            changes={HOSTILE: HOSTILE},
        )
        page = write_report([write_run(tmp_path / f"run{number}", run)])
        with opened(browser, page.as_uri()) as shown:
            shown.page.locator("#groups .card").first.wait_for()
            assert "<img src=" in shown.text("#groups .card .text")
            assert "<script>" in shown.text(".reason")
            assert "rlsys report" in shown.page.title()
            # Even a program that reaches the page cannot act: inline handlers and scripts are off.
            shown.page.evaluate(
                """() => {
                    const box = document.createElement('div');
                    box.innerHTML = '<img src="x:" onerror="document.title=1">';
                    document.body.append(box);
                    const script = document.createElement('script');
                    script.textContent = 'document.title = 2';
                    document.body.append(script);
                }"""
            )
            assert "rlsys report" in shown.page.title()
            refused = [fault for fault in shown.faults if "Content Security Policy" in fault]
            assert len(refused) >= 2
            shown.faults = [fault for fault in shown.faults if fault not in refused]
            shown.requests = shown.requests[:1]


@pytest.mark.slow
def test_a_run_of_10000_steps_and_100_mb(browser: Any, tmp_path: Path) -> None:
    episode = Episode(completion=lambda group, index: "word " * 300, num_tokens=120)
    path = write_run(
        tmp_path / "long",
        SyntheticRun(num_steps=10_000, episode=episode, trace_spans=20, evaluations=lambda s: 0.5),
    )
    assert (path / "rollouts.jsonl").stat().st_size > 90_000_000
    page = write_report([path])
    assert page.stat().st_size <= 5_000_000
    with opened(browser, page.as_uri()) as shown:
        print(f"{page.stat().st_size:,} bytes, first paint after {shown.first_paint_ms():.0f} ms")
        assert shown.first_paint_ms() <= 2000
        shown.page.locator("#reward canvas").first.wait_for()
        expect(shown.page.locator("#groups tbody tr")).to_have_count(15)
        shown.page.locator("summary", has_text="Not on this page").click()
        expect(shown.page.locator("#overview details ul li")).to_have_count(3)


@pytest.mark.slow
def test_a_crashed_run(browser: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", SyntheticRun(planned_steps=200, outcome=None))
    with (path / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
        file.write('{"step": 61, "rew')  # cut by the crash: no damage
    text = (path / "trace.json").read_text()
    (path / "trace.json").write_text(text[: len(text) * 2 // 3])
    page = write_report([path])
    with opened(browser, page.as_uri()) as shown:
        assert shown.text(".state") == "died"
        assert "60 of 200" in shown.text(".run > header")
        assert shown.text(".damage li").startswith("metrics.jsonl, line 61")
        shown.page.locator("#time canvas").wait_for()


@pytest.mark.slow
def test_a_run_of_several_turns(browser: Any, tmp_path: Path) -> None:
    turns = [
        {"branch": 0, "role": "user", "text": "What is 2+2?", "sampled": False},
        {"branch": 0, "role": "assistant", "text": 'call add({"a": 2})', "sampled": True},
        {"branch": 0, "role": "tool", "text": "4", "sampled": False},
        {"branch": 1, "role": "assistant", "text": "4", "sampled": True},
    ]
    path = write_run(tmp_path / "run", SyntheticRun(num_steps=4, episode=Episode(turns=turns)))
    with opened(browser, write_report([path]).as_uri()) as shown:
        card = shown.page.locator("#groups .card").first
        expect(card.locator(".turn")).to_have_count(4)
        expect(card.locator(".turn.sampled")).to_have_count(2)
        assert [one.inner_text() for one in card.locator(".who").all()] == [
            "user",
            "assistant",
            "tool",
            "assistant",
        ]
        assert card.locator(".turn .note").inner_text() == "branch 1"


@pytest.mark.slow
def test_four_runs_side_by_side(browser: Any, tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"run{i}", SyntheticRun(num_steps=20 + i, seed=i, changes={"seed": i}))
        for i in range(4)
    ]
    page = write_report(paths, tmp_path / "all.html")
    with opened(browser, page.as_uri()) as shown:
        expect(shown.page.locator(".run")).to_have_count(4)
        shown.page.locator("#stability .plot .u-legend .u-series").first.wait_for()
        expect(shown.page.locator("#stability .plot").first.locator(".u-series")).to_have_count(5)
        histograms = shown.page.locator("#stability figure", has=shown.page.locator(".histogram"))
        titles = histograms.locator("h3").all_inner_texts()
        assert titles == [f"Staleness of run{i}" for i in range(4)]
        assert [
            f"1: {4 * (20 + i) - 4} of {4 * (20 + i)}" in label
            for i, label in enumerate(
                histograms.locator(".histogram").evaluate_all(
                    "all => all.map((one) => one.getAttribute('aria-label'))"
                )
            )
        ] == [True] * 4
        shown.page.locator("nav select").select_option("2")
        shown.page.locator("#ledger h2", has_text="run2").wait_for()
        assert shown.text("#configuration tbody th") == "num_steps"


@pytest.mark.slow
def test_a_live_page_shows_new_steps(browser: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", SyntheticRun(num_steps=5, planned_steps=9, outcome=None))
    longer = write_run(tmp_path / "longer", SyntheticRun(num_steps=8))
    with RunDirectory(path), ReportServer(path, host="127.0.0.1", port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        context = browser.new_context()
        shown = Opened(context.new_page())
        shown.go(server.url)
        assert shown.text(".facts dd").startswith("5 / 9")
        shutil.copy(longer / "metrics.jsonl", path / "metrics.jsonl")
        shown.page.locator(".facts dd", has_text="8 / 9").wait_for()
        context.close()
        server.shutdown()
        thread.join()
    assert shown.faults == []
    assert all(url.startswith((server.url, "data:")) for url in shown.requests)
