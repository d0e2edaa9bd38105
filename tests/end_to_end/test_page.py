"""The page at / in a real Chromium: chat, pictures, and Engine under load.

    apt install chromium chromium-driver && pip install -e '.[browser]'
    JAXSGL_TEST_NIGHTLY=1 pytest tests/end_to_end/test_page.py -rs

With JAXSGL_TEST_AXE=FILE, axe-core's axe.min.js (`npm install axe-core`), it is also searched for what keeps people
with a screen reader or a keyboard out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from make.vision_demo import make

from tests.end_to_end.servers import COMMON_FLAGS, RunningServer, check_log, running_server
from tests.grids import NIGHTLY
from tests.preprocess.pictures import data_url, file_of, picture

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
AXE = os.environ.get("JAXSGL_TEST_AXE")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,900",
)  # fmt: skip
NUM_STREAMS = 32
PATIENCE_S = 60.0
VISION_FLAGS = (
    "--dtype", "float32", "--page-size", "4", "--max-total-tokens", "2048", "--context-length", "512",
    "--max-running-requests", "2", "--decode-buckets", "2", "--extend-buckets", "128", "--chunked-prefill-size", "128",
    "--mm-pool-tokens", "256", "--mm-max-patches", "256",
)  # fmt: skip
# Keeps the bodies that the page sends; and puts a picture into the clipboard that is pasted.
RECORD = """
const send = fetch;
window.sent = [];
window.fetch = (address, options) => { if (options?.body) sent.push(options.body); return send(address, options); };
"""
PASTE = """
const bytes = Uint8Array.from(atob(arguments[0]), (letter) => letter.charCodeAt(0));
const clipboardData = new DataTransfer();
clipboardData.items.add(new File([bytes], "pasted.png", { type: "image/png" }));
document.getElementById("prompt").dispatchEvent(new ClipboardEvent("paste", { clipboardData }));
"""

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
    with browser(server, tmp_path) as page:
        yield page


@contextlib.contextmanager
def browser(server: RunningServer, folder: Path) -> Iterator[Page]:
    """A browser whose profile is new; nothing that it does may be an error of its console."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
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
                # The server may close a connection that waited long for its next request, on a busy machine.
                with (
                    contextlib.suppress(httpx.RemoteProtocolError),
                    http.stream("POST", f"http://{server.http_address}/v1/chat/completions", json=body) as answer,
                ):
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
    assert not page.all("#attach")[0].is_displayed()  # the bundled model sees no pictures
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


def shown(page: Page, css: str) -> list[tuple[str, int]]:
    """Addresses and widths of pictures; 0 if one isn't drawn."""
    return [(image.get_attribute("src"), image.get_property("naturalWidth")) for image in page.all(css)]


def test_pictures_from_files_and_the_clipboard_are_shown_sent_and_answered(tmp_path: Path) -> None:
    make(tmp_path / "demo")
    first, second = picture(96, 64), picture(64, 128, seed=2)
    (tmp_path / "first.png").write_bytes(file_of(first))
    (tmp_path / "notes.txt").write_text("no picture")
    urls = [data_url(first), data_url(second)]

    with (
        running_server(tmp_path, ("--model", str(tmp_path / "demo"), *VISION_FLAGS)) as server,
        browser(server, tmp_path) as page,
    ):
        page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": RECORD})
        page.open("chat")
        page.wait(lambda: page.all("#attach")[0].is_displayed())
        page.press("Settings")
        page.all("#set-temperature")[0].send_keys("0")
        page.all("#set-max_tokens")[0].send_keys("8")
        page.press("Close")

        page.all("#file")[0].send_keys(
            "\n".join(str(tmp_path / name) for name in ("first.png", "notes.txt", "first.png"))
        )
        page.wait(lambda: shown(page, "#attached img") == [(urls[0], 96)] * 2)
        assert page.text("#attach-error") == "notes.txt is no image."
        page.press("Remove")
        page.driver.execute_script(PASTE, urls[1].partition(",")[2])
        page.wait(lambda: shown(page, "#attached img") == [(urls[0], 96), (urls[1], 64)])
        assert page.text("#attach-error") == ""

        page.ask("What is this?")
        page.answer()
        assert shown(page, "#attached img") == [] and shown(page, "li.user img.picture") == [
            (urls[0], 96),
            (urls[1], 64),
        ]
        (sent,) = map(json.loads, page.driver.execute_script("return sent"))
        *parts, asked = sent["messages"][0]["content"]
        assert [part["image_url"]["url"] for part in parts] == urls and asked["text"] == "What is this?"
        again = httpx.post(
            f"{page.address}/v1/chat/completions", json={**sent, "stream": False, "stream_options": None}
        )
        answer, usage = again.json()["choices"][0]["message"]["content"], again.json()["usage"]
        assert page.text("li.assistant .said") == answer.strip()
        assert usage["prompt_tokens"] > (96 * 64 + 64 * 128) // 32**2, "a token for each square of 32 pixels"
        stats = page.text("li.assistant .stats")
        assert f"prompt {usage['prompt_tokens']}" in stats and "tokens/s" in stats, "it streamed"

        page.driver.refresh()
        page.wait(lambda: page.all("#history-list .entry"))[0].click()
        assert page.wait(lambda: shown(page, "li.user img.picture")) == [(urls[0], 96), (urls[1], 64)]
        check_log(server)


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
    page.wait(lambda: "decode 8" in page.text("#plans"))
    page.wait(lambda: len(page.all("#requests tbody tr")) > 16)
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
