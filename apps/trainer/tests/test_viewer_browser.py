"""The pages of `trainer view` in a browser: headless Chromium, where there is one."""

import asyncio
import importlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp.test_utils import TestServer

from unirl.tracking.sample_files import SampleFiles
from unirl.types.samples import Image, SampleRecord, Sound, Text, Video
from unirl.viewer.server import make_app

BENCH = Path(__file__).parents[1] / "bench"
HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
PAGES = ("runs", "curves", "gallery?run=a", "groups?run=a", "timeline?run=a", "details?run=a&run=b")


@pytest.fixture
def browsing(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    module: Any = importlib.import_module("browser")
    if module.found() is None:
        pytest.skip("no chromium here")
    return module


def metrics(step: int) -> str:
    return json.dumps({"step": step, "reward/mean": step / 10, "reward/size/mean": 1.0, "train/loss": 1 / step}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Runs `a` with everything and `b` with curves alone."""
    for name in ("a", "b"):
        run = tmp_path / name
        (run / "samples").mkdir(parents=True)
        (run / "config.yaml").write_text(f"recipe: worlds/a\nseed: {len(name)}\nname: {name}\n", encoding="utf-8")
        (run / "metrics.jsonl").write_text("".join(metrics(step) for step in range(1, 6)), encoding="utf-8")
    run = tmp_path / "a"
    lane = {"step": 1, "lane": "engine", "what": "rollout", "begin": 10.0, "end": 11.0, "rollout": 1, "request": 2}
    (run / "timeline.jsonl").write_text(json.dumps({**lane, "version": 0}) + "\n", encoding="utf-8")
    (run / "run.log").write_text(HOSTILE, encoding="utf-8")
    (run / "alerts.jsonl").write_text(json.dumps({"step": 1, "alarm": "a", "text": HOSTILE}) + "\n", encoding="utf-8")
    (run / "checkpoints" / "step-000005").mkdir(parents=True)
    files = SampleFiles(run / "samples")
    pixels = torch.zeros(3, 8, 8, dtype=torch.uint8)
    usual: dict[str, Any] = {"group_id": "g", "prompt_id": "p", "group_size": 2, "group_reward_std": 0.0}
    for step in (0, 5):
        image = Image(pixels + 50 * step)
        usual.update(scores={"reward": step}, prompt=HOSTILE)
        files.write("eval", step, [SampleRecord(sample_id="e", track="image", media=image, **usual)])
    sound = SampleRecord(sample_id="w", track="sound", media=Sound(torch.zeros(800), 8000), **usual)
    video = Video(pixels.expand(4, 3, 8, 8).contiguous(), 8.0, 4)
    files.write("rollout", 4, [sound, SampleRecord(sample_id="v", track="video", media=video, **usual)])
    said: list[dict[str, Any]] = [
        {"role": role, "content": HOSTILE} for role in ("user", "assistant", "tool", "assistant")
    ]
    said[0]["images"], said[2]["images"] = 1, 2
    usual["metadata"] = {"episode": {"transcript": said}}
    usual["given"] = tuple(Image(pixels + 20 * level) for level in range(3))
    records = [SampleRecord(sample_id=f"s{i}", track="text", media=Text(HOSTILE, 2), **usual) for i in range(60)]
    files.write("rollout", 3, records)
    trace = {"kind": "tokens", "sample_id": "s0", "update": 0, "tokens": [1, 2], "texts": ["<b>", " x"]}
    files.write_traces("rollout", 3, [{**trace, "logp": [-1.0, -0.5], "trained_logp": [-1.0, None]}])
    return tmp_path


def browse(browsing: Any, folder: Path, action: Callable[[Any, str], Awaitable[None]]) -> None:
    """Run an action with a tab and the address of the page. The console must have stayed silent."""

    async def run() -> None:
        async with (
            TestServer(make_app(folder)) as server,
            aiohttp.ClientSession() as session,
            browsing.Browser(session) as browser,
            browser.tab() as tab,
        ):
            await action(tab, str(server.make_url("/")))
            assert tab.said == []

    asyncio.run(run())


def has(selector: str, number: int = 1) -> str:
    return f"document.querySelectorAll({json.dumps(selector)}).length >= {number}"


READY = {
    "runs": has("tbody tr", 2),
    "curves": has(".chart canvas", 2),
    "gallery?run=a": has(".card img") + " && " + has(".card audio"),
    "groups?run=a": has(".strip.flat .card", 8),
    "timeline?run=a": has(".lanes canvas"),
    "details?run=a&run=b": has("tr", 3) + " && document.body.textContent.includes('resume=auto')",
}


def test_every_page_fits_a_phone_in_both_themes_and_shows_hostile_text_as_text(browsing: Any, folder: Path):
    async def action(tab: Any, address: str) -> None:
        for width, height, is_dark in ((390, 844, True), (1280, 900, False)):
            await tab.size(width, height, is_dark=is_dark)
            for page in PAGES:
                await tab.open(f"{address}#/{page}")
                await tab.until(READY[page])
                assert await tab.value("document.documentElement.scrollWidth <= innerWidth"), (page, width)
                assert await tab.value("document.title") != "hacked"
                paper = await tab.value("getComputedStyle(document.body).backgroundColor")
                assert (paper == "rgb(255, 255, 255)") is not is_dark
        assert await tab.value("document.querySelector('.log').textContent") == HOSTILE
        await tab.value("theme = document.querySelector('.theme select'), theme.value = 'dark'")
        await tab.value("theme.dispatchEvent(new Event('change'))")
        await tab.open(f"{address}?again#/runs")
        await tab.until(READY["runs"])
        assert await tab.value("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"

    browse(browsing, folder, action)


def test_curves_grow_while_a_run_writes(browsing: Any, folder: Path):
    async def action(tab: Any, address: str) -> None:
        await tab.open(f"{address}#/curves?run=a")
        await tab.until(READY["curves"])
        await tab.until("document.querySelector('.plot').ariaLabel.includes('ends at 0.5')")
        await tab.until("document.querySelector('.live')?.textContent === 'live'")
        with (folder / "a" / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(metrics(7))
        await tab.until("document.querySelector('.plot').ariaLabel.includes('ends at 0.7')")

    browse(browsing, folder, action)


def test_a_sample_has_its_tokens_the_other_steps_and_a_slider(browsing: Any, folder: Path):
    async def action(tab: Any, address: str) -> None:
        await tab.open(f"{address}#/sample?run=a&kind=rollout&step=3&offset=0")
        await tab.until(has(".token", 2))
        assert await tab.value("document.querySelector('.token').textContent") == "<b>"
        assert await tab.value("document.querySelector('.large .said').textContent") == HOSTILE
        assert await tab.value("document.querySelectorAll('.turns li.own').length") == 2
        assert await tab.value("document.querySelector('.turns .said').textContent") == HOSTILE
        assert await tab.value("document.querySelectorAll('.sample > .given img').length") == 1
        assert await tab.value("document.querySelectorAll('.turns li:nth-child(3) img').length") == 2
        assert await tab.value("document.querySelectorAll('.turns img').length") == 2
        await tab.open(f"{address}#/sample?run=a&kind=eval&step=5&offset=0")
        await tab.until(has(".over img", 2))
        await tab.value("slider = document.querySelector('.compare [type=range]'), slider.value = 20")
        await tab.value("slider.dispatchEvent(new Event('input'))")
        await tab.until("document.querySelector('.over .top').style.clipPath.includes('80%')")

    browse(browsing, folder, action)


def test_the_keyboard_reaches_the_list_and_follows_it(browsing: Any, folder: Path):
    async def action(tab: Any, address: str) -> None:
        await tab.open(f"{address}#/runs")
        await tab.until(READY["runs"])
        await tab.press("Tab")
        assert await tab.value("document.activeElement.textContent") == "Skip to content"
        for _ in range(40):
            await tab.press("Tab")
            if await tab.value("document.activeElement.matches('tbody a')"):
                break
        await tab.press("Enter")
        await tab.until("location.hash.startsWith('#/curves?run=')")

    browse(browsing, folder, action)


def test_a_run_that_is_not_there_is_one_message(browsing: Any, folder: Path):
    async def action(tab: Any, address: str) -> None:
        await tab.open(f"{address}#/sample?run=a&kind=eval&step=5&offset=77")
        await tab.until(has("[role=alert]"))
        assert "no such sample" in await tab.value("document.querySelector('[role=alert]').textContent")
        await tab.open(f"{address}#/nothing")
        await tab.until("document.body.textContent.includes('There is no page nothing')")
        # Browsers report answers of 404 themselves.
        tab.said[:] = [line for line in tab.said if "404" not in line]

    browse(browsing, folder, action)
