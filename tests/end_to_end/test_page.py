"""The page at / in a real Chromium: chat, and Engine under load.

    apt install chromium chromium-driver && pip install -e '.[browser]'
    JAXSGL_TEST_NIGHTLY=1 pytest tests/end_to_end/test_page.py -rs

With JAXSGL_TEST_AXE=FILE, axe-core's axe.min.js (`npm install axe-core`), it is also searched for what keeps people
with a screen reader or a keyboard out.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.servers import COMMON_FLAGS, RunningServer, check_log, running_server
from tests.grids import NIGHTLY

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
AXE = os.environ.get("JAXSGL_TEST_AXE")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,900",
)  # fmt: skip
NUM_STREAMS = 32
PATIENCE_S = 60.0

pytestmark = [
    pytest.mark.skipif(not NIGHTLY, reason="starts a browser; by night"),
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="apt install chromium chromium-driver"),
    pytest.mark.skipif(importlib.util.find_spec("selenium") is None, reason="pip install -e '.[browser]'"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), COMMON_FLAGS) as running:
        yield running
        check_log(running)


class Page:
    """A browser with the page in it."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver = driver
        self.address = f"http://{address}"

    def open(self, view: str) -> None:
        self.driver.get(f"{self.address}/#{view}")

    def all(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def text(self, css: str) -> str:
        return " ".join(str(element.text) for element in self.all(css))

    def wait(self, look: Callable[[], Any]) -> Any:
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        waits = WebDriverWait(self.driver, PATIENCE_S, 0.1, (StaleElementReferenceException,))
        return waits.until(lambda _: look())

    def press(self, name: str, within: str = "main") -> None:
        self.wait(lambda: [button for button in self.all(f"{within} button") if button.text == name])[-1].click()

    def ask(self, text: str) -> None:
        self.wait(lambda: self.all("#status-dot[data-kind=good]"))
        self.all("#prompt")[0].send_keys(text + "\n")

    def answer(self) -> str:
        """The last answer, once it has ended."""
        return str(self.wait(lambda: self.text("#send") == "Send" and self.all("li.assistant"))[-1].text)


@pytest.fixture
def page(server: RunningServer, tmp_path: Path) -> Iterator[Page]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield Page(driver, server.http_address)
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
    finally:
        driver.quit()


@pytest.fixture
def load(server: RunningServer) -> Iterator[None]:
    """Keeps 32 streams open, four prompts with a common beginning."""
    stop = threading.Event()
    about = "You answer at length and in full sentences. " * 3

    def stream(number: int) -> None:
        body = {
            "messages": [{"role": "system", "content": about}, {"role": "user", "content": f"Count to {number % 4}"}],
            "max_tokens": 64, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with httpx.Client(timeout=120) as http:
            while not stop.is_set():
                with http.stream("POST", f"http://{server.http_address}/v1/chat/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        pass

    streams = [threading.Thread(target=stream, args=(number,)) for number in range(NUM_STREAMS)]
    for each in streams:
        each.start()
    yield
    stop.set()
    for each in streams:
        each.join()


def test_a_chat_streams_is_made_again_and_is_there_after_a_reload(page: Page) -> None:
    page.open("chat")
    page.ask("What is 3 + 4?")
    assert "3 + 4 = 7." in page.answer()
    assert "tokens/s" in page.text("li.assistant .stats") and "first after" in page.text("li.assistant .stats")
    page.press("Regenerate")
    assert "3 + 4 = 7." in page.answer()
    assert [len(page.all(f"li.{role}")) for role in ("user", "assistant")] == [1, 1]
    page.ask("What is 2 + 5?")
    page.answer()
    assert [len(page.all(f"li.{role}")) for role in ("user", "assistant")] == [2, 2]
    page.driver.refresh()
    page.wait(lambda: page.all("#history-list .entry"))[0].click()
    assert "3 + 4 = 7." in page.text("#messages")
    page.press("New chat")
    assert page.text("#messages") == ""


@pytest.mark.usefixtures("load")
def test_an_answer_is_stopped_and_the_engine_is_seen_at_work(page: Page) -> None:
    page.open("chat")
    page.ask("Tell me a story")  # which waits: the server runs 8 at once
    page.press("Stop")
    page.answer()
    assert "stopped" in page.text("li.assistant .stats")

    page.open("engine")
    page.wait(lambda: len(page.all("#plans li .num")) > 20)

    def seen() -> dict[str, str]:
        label = page.all("#pages-map")[0].get_attribute("aria-label")
        return {
            "pages": str(label),
            "tree": page.text("#tree-hint"),
            "plans": page.text("#plans li:first-child .num"),
            "times": page.text("#steps-hint"),
        }

    before = seen()
    page.wait(lambda: all(before[name] != now for name, now in seen().items() if name != "tree"))
    assert "nodes" in before["tree"] and len(page.all("#tree-chart rect")) > 1
    page.wait(lambda: page.all("#tree-chart rect.owned"))  # a prefix that several requests share
    page.wait(lambda: len(page.all("#steps-chart g.decode")) > 5 and page.all("#steps-chart g.extend"))
    page.wait(lambda: page.text("#figure-running").startswith("8 ") and int(page.text("#figure-waiting")) > 8)
    assert "decode 8" in page.text("#plans")
    assert len(page.all("#requests tbody tr")) > 16
    assert page.all("#shapes .shape.ran")
    page.press("Freeze")
    frozen = seen()
    threading.Event().wait(1.5)
    assert seen() == frozen


@pytest.mark.skipif(AXE is None, reason="JAXSGL_TEST_AXE names no axe.min.js")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_fault(page: Page, theme: str) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    page.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    page.open("chat")
    page.ask("What is 3 + 4?")
    page.answer()
    page.press("Settings")
    for view in ("chat", "engine", "docs"):
        if view == "docs":
            page.driver.get(f"{page.address}/docs")
            page.wait(lambda: page.all("summary"))[9].click()
        else:
            page.open(view)
        page.driver.execute_script(Path(str(AXE)).read_text())
        found = page.driver.execute_async_script("axe.run().then(arguments[0])")["violations"]
        assert [(fault["id"], fault["help"]) for fault in found if fault["impact"] in ("serious", "critical")] == []
