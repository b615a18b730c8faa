"""The page at /ui in a real Chromium: at 0, 1 and 50 running requests, on a phone, and without its server.

CROSSPOOL_CHROMIUM names the browser's executable; CROSSPOOL_SCREENSHOTS a folder to keep pictures in.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from crosspool.engine.stats import LaneStats
from crosspool.engine.step_log import StepSpan
from crosspool.errors import ShuttingDownError
from tests.support.fake_engine import FakeEngine, Script
from tests.support.live_server import live_server
from tests.support.server_fixtures import fake_app

pytestmark = pytest.mark.ui
CHROMIUM = os.environ.get("CROSSPOOL_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
MODELS = ("tiny", "other", "third", "fourth")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium; install it, or name it in CROSSPOOL_CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Page:
    """A page that remembers what went wrong in it."""

    def __init__(self, browser: Any, url: str, path: str = "/ui", **options: Any) -> None:
        self.tab = browser.new_page(**{"viewport": {"width": 1200, "height": 1000}, **options})
        self.troubles: list[str] = []
        self.tab.on("console", lambda message: self._note(message.type, message.text))
        self.tab.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.tab.goto(f"{url}{path}")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *error: object) -> None:
        self.tab.close()

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.troubles.append(text)

    def status(self, text: str) -> None:
        self.tab.wait_for_function("text => document.querySelector('#status').textContent.includes(text)", arg=text)

    def column(self, index: int) -> list[str]:
        return list(self.tab.locator(f"#models tbody tr > :nth-child({index})").all_inner_texts())

    def keep(self, name: str) -> None:
        if folder := os.environ.get("CROSSPOOL_SCREENSHOTS"):
            self.tab.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine(MODELS, max_queue=500)


@pytest.mark.parametrize("num_running", [0, 1, 50])
def test_the_page_shows_what_runs(browser: Any, fake: FakeEngine, tmp_path: Path, num_running: int) -> None:
    fake.scripts = {name: Script(delay_s=0.05) for name in MODELS}
    fake.steps = [StepSpan(0, "decode", "tiny", 4, 1e12 + i, 1e12 + i + 0.5, 0.1) for i in range(3)]
    with live_server(fake_app(fake, tmp_path)) as url, Page(browser, url) as page:
        for index in range(num_running):
            threading.Thread(target=_read, args=(url, MODELS[index % 4]), daemon=True).start()
        page.status(f"{num_running} running" if num_running else "idle")
        page.tab.wait_for_timeout(1200)
        assert page.column(1) == list(MODELS)
        assert sum(int(text) for text in page.column(3)) == num_running
        shown = page.tab.inner_text("#kv-pool")
        assert "64.0 KiB used, 32.0 KiB reserved, 96.0 KiB reusable, 208 KiB free of 400 KiB" in shown
        label = page.tab.locator("#weights-pool canvas").get_attribute("aria-label")
        assert label == "w0: 800 B of 4 models. " + ", ".join(f"{name} 200 B" for name in MODELS)
        assert page.tab.locator(".chart canvas").count() == 4
        page.keep(f"running_{num_running}")
        assert page.troubles == []


def test_a_bar_of_the_timeline_is_attention_ffn_and_transfer(browser: Any, fake: FakeEngine, tmp_path: Path) -> None:
    lane = LaneStats(lane=0, phase="decode", state="idle", model=None, step_seq=9, num_seqs=0, since_s=None)
    fake.lanes = (lane,)
    now = time.monotonic()
    fake.steps = [StepSpan(0, "decode", "tiny", 4, now + 2, now + 3, 0.5, 0.3, 0.1)]  # in view for some seconds
    with live_server(fake_app(fake, tmp_path)) as url, Page(browser, url) as page:
        page.status("idle")
        page.tab.select_option("#window", "5")
        page.tab.wait_for_timeout(3500)
        label = page.tab.locator("#lanes").get_attribute("aria-label")
        assert label == "decode lane 0: idle, 50 % attention, 30 % FFN, 10 % transfer"
        heights = page.tab.evaluate(
            """() => {
              const canvas = document.querySelector('#lanes');
              const all = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
              const ratio = canvas.width / canvas.clientWidth;
              const middle = 92 + (canvas.clientWidth - 92) * (1 - 0.9 / 5);
              for (let x = middle; x > 92; x -= 2) {
                const runs = [];
                for (let y = 4 * ratio; y < 26 * ratio; y += 1) {
                  const at = 4 * (y * canvas.width + Math.round(x * ratio));
                  const colour = all.slice(at, at + 3).join();
                  if (!runs.length || runs.at(-1)[0] !== colour) runs.push([colour, 0]);
                  runs.at(-1)[1] += 1 / (22 * ratio);
                }
                if (runs.length >= 4) return runs.map((run) => run[1]);
              }
              return [];
            }"""
        )
        idle, *transfer, ffn, attention = heights  # edges are blended
        assert [idle, sum(transfer), ffn, attention] == pytest.approx([0.1, 0.1, 0.3, 0.5], abs=0.06)
        page.keep("timeline")
        assert page.troubles == []


def _read(url: str, model: str) -> None:
    body = {"model": model, "prompt": "hi", "max_tokens": 100, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
        for _ in response.iter_lines():
            pass


def test_the_cells_of_a_map_are_shares_of_the_pool(browser: Any, fake: FakeEngine, tmp_path: Path) -> None:
    with live_server(fake_app(fake, tmp_path)) as url, Page(browser, url) as page:
        page.status("idle")
        shares = page.tab.evaluate(
            """() => {
              const canvas = document.querySelector('#kv-pool canvas');
              const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
              const counts = {};
              for (let i = 0; i < data.length; i += 4) {
                const colour = data.slice(i, i + 3).join();
                if (data[i + 3] === 255) counts[colour] = (counts[colour] ?? 0) + 1;
              }
              const total = Object.values(counts).reduce((a, b) => a + b);
              return Object.values(counts).map((count) => count / total).sort((a, b) => b - a);
            }"""
        )
        # 100 frames: of each of 4 models 6 reusable, 4 used, 2 reserved; 52 free; a cell is coarser than a frame
        assert len(shares) == 13
        assert shares[0] == pytest.approx(0.52, abs=0.02)
        assert sum(shares[1:5]) == pytest.approx(0.24, abs=0.03)
        assert sum(shares[5:9]) == pytest.approx(0.16, abs=0.03)


def test_answers_stream_side_by_side_and_stop(browser: Any, fake: FakeEngine, tmp_path: Path) -> None:
    fake.scripts = {name: Script(delay_s=0.05) for name in MODELS}
    with live_server(fake_app(fake, tmp_path)) as url, Page(browser, url) as page:
        page.status("idle")
        page.tab.fill("#max-tokens", "4")
        page.tab.focus("#prompt")
        page.tab.keyboard.press("Control+Enter")
        ended = "[...document.querySelectorAll('.facts')].filter((e) => e.textContent.startsWith('4 tokens'))"
        page.tab.wait_for_function(f"() => {ended}.length === 3")
        assert page.tab.locator(".answer h3").all_inner_texts() == list(MODELS[:3])
        assert page.tab.locator(".answer .text").all_inner_texts() == ["One two three four"] * 3
        page.tab.fill("#max-tokens", "500")
        page.tab.click("#send")
        page.status("3 running")
        page.tab.click("#stop")
        page.tab.wait_for_function("() => document.querySelector('#status').textContent === 'idle'")
        assert page.tab.locator(".facts").all_inner_texts() == ["stopped"] * 3
        assert len(fake.aborted) == 3
        for box in page.tab.locator("#choices input").all():
            box.uncheck()
        page.tab.click("#send")
        assert page.tab.inner_text("#ask-error") == "Choose a model first."
        assert page.troubles == []


def test_everything_can_be_reached_by_keyboard(browser: Any, fake: FakeEngine, tmp_path: Path) -> None:
    with live_server(fake_app(fake, tmp_path)) as url, Page(browser, url) as page:
        page.status("idle")
        reached = []
        for _ in range(14):
            page.tab.keyboard.press("Tab")
            reached.append(page.tab.evaluate("document.activeElement.id || document.activeElement.className"))
        assert reached[0] == "skip"
        assert {"window", "prompt", "max-tokens", "temperature", "send"} <= set(reached)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(browser: Any, fake: FakeEngine, tmp_path: Path, scheme: str) -> None:
    with (
        live_server(fake_app(fake, tmp_path)) as url,
        Page(browser, url, viewport={"width": 360, "height": 740}, color_scheme=scheme) as page,
    ):
        page.status("idle")
        page.tab.wait_for_timeout(1200)
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= 360
        back = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == {"light": "rgb(246, 247, 249)", "dark": "rgb(18, 22, 28)"}[scheme]
        page.keep(f"phone_{scheme}")


def test_a_key_is_asked_for_once(browser: Any, fake: FakeEngine, tmp_path: Path) -> None:
    with live_server(fake_app(fake, tmp_path, api_keys=("secret",))) as url, Page(browser, url) as page:
        page.status("an API key is needed")
        page.tab.keyboard.type("wrong")
        page.tab.keyboard.press("Enter")
        page.tab.wait_for_selector("#key-form:not([hidden])")
        page.tab.fill("#key", "secret")
        page.tab.keyboard.press("Enter")
        page.status("idle")
        page.tab.reload()
        page.status("idle")


def test_a_server_that_is_gone_is_told_and_found_again(browser: Any, fake: FakeEngine, tmp_path: Path) -> None:
    app = fake_app(fake, tmp_path)
    with ExitStack() as closing:
        with live_server(app) as url:
            page = closing.enter_context(Page(browser, url))
            page.status("idle")
            fake.failure = ShuttingDownError("it ended")  # which ends the streams, so that the server can end
        page.status("the server does not answer")
        assert page.tab.evaluate("document.body.classList.contains('stale')")
        page.keep("gone")
        fake.failure = None
        with live_server(app, port=int(url.rsplit(":", 1)[1])):
            page.status("idle")
            assert not page.tab.evaluate("document.body.classList.contains('stale')")
            fake.failure = ShuttingDownError("it ended")


def test_the_page_of_routes_asks_for_the_key_and_shows_every_route_with_its_fields(
    browser: Any, fake: FakeEngine, tmp_path: Path
) -> None:
    app = fake_app(fake, tmp_path, api_keys=("k",))
    with live_server(app) as url, Page(browser, url, "/docs") as page:
        page.tab.fill("#key", "k")
        page.tab.click("#key-form button")
        page.tab.wait_for_selector("details")
        assert page.tab.locator("details").count() == sum(map(len, app.openapi()["paths"].values()))
        chat = page.tab.locator("details", has_text="/v1/chat/completions")
        chat.locator("summary").click()
        shown = chat.inner_text()
        for part in ("messages", "list of object", "required", "temperature", "number", "429"):
            assert part in shown, part
        page.keep("routes")
        assert [trouble for trouble in page.troubles if "401" not in trouble] == []
