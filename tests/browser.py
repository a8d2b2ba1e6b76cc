"""A headless Chromium, driven by Playwright, for tests of the page; where there is none they skip.

Playwright's own builds come from no package registry, so it is the machine's: Debian's `chromium`,
or what BATON_CHROMIUM names.
"""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

PATIENCE_MS = 60_000
"""A browser is a lot for a machine that runs other tests beside it."""
expect.set_options(timeout=PATIENCE_MS)

NAMES = ("chromium", "chromium-browser", "google-chrome")


def _find() -> str:
    named = os.environ.get("BATON_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium, or name one in BATON_CHROMIUM")
    return found


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    path = _find()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def page_at(browser: Browser, url: str, **context: Any) -> AsyncIterator[Page]:
    """With Baton's page at `url`, live. Fails if the page ever does what its policy forbids, or
    raises what nobody catches."""
    problems: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text or "Trusted Type" in message.text:
            problems.append(message.text)

    context = {"viewport": {"width": 1440, "height": 900}, **context}
    opened = await browser.new_context(**context)
    try:
        page = await opened.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", heard)
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.goto(url)
        yield page
    finally:
        await opened.close()
    assert not problems


async def live(page: Page) -> None:
    """It has a connection, and all it shows is here."""
    await page.wait_for_selector("#link[data-state=live]")
    await page.wait_for_selector(".worker[data-ready=true]")


async def faults(page: Page) -> list[str]:
    """What axe-core finds wrong with the page as it is now."""
    script = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    await page.evaluate(f"{script}; 0")
    # Colours that are on their way would be judged as they happen to be.
    await page.evaluate("Promise.all(document.getAnimations().filter(one => "
                        "one.effect.getComputedTiming().iterations !== Infinity)"
                        ".map(one => one.finished.catch(() => 0)))")  # fmt: skip
    told = await page.evaluate("axe.run({resultTypes: ['violations']})")
    assert told["passes"], "it has looked"
    return [
        f"{found['impact']} {found['id']}: {node['html'][:120]} {node['any'][:1]}"
        for found in told["violations"]
        for node in found["nodes"]
    ]


async def bars(page: Page, inside: str) -> list[dict[str, Any]]:
    """The sums of the waterfall in `inside`: of each its total, its parts as they are told and how
    wide they are drawn, as shares."""
    drawn: list[dict[str, Any]] = await page.evaluate(
        """inside => [...document.querySelectorAll(`${inside} .sum`)].map(sum => ({
            total: Number(sum.dataset.total),
            parts: Object.fromEntries([...sum.querySelectorAll("li")].map(
                part => [part.dataset.part, Number(part.dataset.ms)])),
            widths: [...sum.querySelectorAll(".sum-bar i")].map(
                bar => bar.getBoundingClientRect().width),
        }))""",
        inside,
    )
    return drawn
