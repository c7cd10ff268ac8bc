"""The page in a real browser: chat with a picture, hear sound, watch the graph, see a killed role turn red."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from omni_flow.serve.endpoints import ChatCompletions, Images
from omni_flow.serve.server import Serving

from . import graphs
from .conftest import Host, hosted, png

WAIT_MS = 20_000
CHROMIUM = next(
    (p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(p).exists()), "/usr/bin/chromium"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--autoplay-policy=no-user-gesture-required",
                "--use-fake-device-for-media-stream",
                "--use-fake-ui-for-media-stream",
            ],
        )
        yield made
        made.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Host]:
    chat = ChatCompletions(text="text", image="picture", audio="sound", out_text="answer", out_audio="speech")
    draw = Images(prompt="prompt", width="width", height="height", out_image="picture", out_partial="partial")
    with hosted(Serving(graphs.chat(0.02), (chat,)), Serving(graphs.painter(), (draw,)), processes=True) as running:
        yield running


@pytest.fixture
def page(browser: Browser, site: Host) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1440, "height": 1000}, permissions=["microphone"])
    opened = context.new_page()
    opened.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    opened.goto(site.url)
    expect(opened.locator("#status")).to_have_text("up")
    shots = os.environ.get("OMNI_FLOW_SCREENSHOTS")
    yield opened
    if shots:
        opened.screenshot(
            path=f"{shots}/{os.environ['PYTEST_CURRENT_TEST'].split('::')[1].split(' ')[0]}.png", full_page=True
        )
    context.close()
    assert wrong == []


def ask(page: Page, text: str) -> Any:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    return page.locator(".bubble:not(.mine)").last


def test_a_message_with_a_picture_is_answered_with_text_and_sound(page: Page, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png())
    page.set_input_files("#picture", tmp_path / "red.png")
    expect(page.locator(".chip")).to_contain_text("picture")
    answer = ask(page, "what is this")
    expect(answer.locator("span").first).to_have_text("what is this [picture 32x16 200,30,30]")
    expect(answer.locator("audio")).to_be_visible()
    seconds = answer.locator("audio").evaluate(
        "a => new Promise(r => a.readyState ? r(a.duration) : a.addEventListener('canplay', () => r(a.duration)))"
    )
    assert seconds == pytest.approx(0.38, abs=0.02)
    expect(page.locator(".bubble.mine img")).to_be_visible()


def test_the_graph_shows_what_runs(page: Page) -> None:
    expect(page.locator(".flow .node")).to_have_count(4)
    ask(page, "a b c d")
    expect(page.locator(".flow .edge.busy").first).to_be_attached()
    expect(page.locator("#interfaces tr").first).not_to_contain_text("llm.say0.0")
    page.locator("#requests button").first.click()
    expect(page.locator("#timeline svg.times")).to_be_visible()
    expect(page.locator("#timeline")).to_contain_text("llm.say")


def test_the_microphone_is_heard(page: Page) -> None:
    page.get_by_role("button", name="Microphone").click()
    expect(page.get_by_role("button", name="Stop recording")).to_be_visible()
    page.wait_for_function("performance.now() > 0")
    page.get_by_role("button", name="Stop recording").click()
    expect(page.locator(".chip")).to_contain_text("sound")
    expect(ask(page, "hear").locator("span").first).to_contain_text("[sound ")


def test_a_picture_is_drawn(page: Page) -> None:
    page.get_by_label("Model").select_option(label="painter · pictures")
    answer = ask(page, "a red one")
    expect(answer.locator("img")).to_be_visible()
    assert answer.locator("img").evaluate("i => i.decode().then(() => i.naturalWidth)") == 512


def test_a_killed_role_turns_red_and_comes_back(page: Page, site: Host) -> None:
    node = page.locator(".flow .node[data-role=voice]")
    expect(node).to_have_class("node up")
    status = site.call(lambda: site.server.deployments[0].status())
    os.kill(status["voice"].replicas[0].pid, signal.SIGKILL)
    expect(node).to_have_class("node down")
    expect(page.locator("#status")).to_have_text("trouble")
    expect(page.locator("#replicas")).to_contain_text("SIGKILL")
    answer = ask(page, "still there")
    expect(answer.locator("span").first).to_have_text("still there")


def test_everything_can_be_done_by_keyboard(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    page.locator("#message").focus()
    for wanted in ("#picture", "#record", "#speak", "#send"):
        page.keyboard.press("Tab")
        expect(page.locator(wanted)).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_have_readable_text(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    colours = page.evaluate(
        "() => ['color', 'backgroundColor'].map(n => getComputedStyle(document.body)[n].match(/\\d+/g).map(Number))"
    )
    assert contrast(*colours) > 7
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate("document.documentElement.dataset.theme") != scheme


def contrast(one: list[int], other: list[int]) -> float:
    """WCAG's ratio."""

    def light(colour: list[int]) -> float:
        parts = [v / 255 / 12.92 if v / 255 <= 0.03928 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in colour[:3]]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted([light(one), light(other)], reverse=True)
    return (high + 0.05) / (low + 0.05)
