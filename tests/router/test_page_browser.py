"""The page in a browser, over fake workers: what it shows is what happens, for everybody."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from protos import serving_pb2 as pb
from tests.browser import bars, chromium, faults, live, page_at
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.door import door_to
from tests.router.fake_workers import FakeCluster, GenerateCall, fake_cluster, until
from tests.router.test_gate import KEY, OPERATOR, lines
from tests.router.timed_relay import hosts_apart, relay_timed

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser for all, and so one loop

MAX_MODEL_LEN = 1000
"""As much as the page asks for, and more."""
PHONE = {"width": 360, "height": 740}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@asynccontextmanager
async def relay(
    answer: Sequence[int], start_router: StartRouter, **config: object
) -> AsyncIterator[tuple[FakeCluster, RunningRouter]]:
    """Two workers of each kind, with something in their pools."""
    async with fake_cluster(answer, num_prefills=2, num_decodes=2) as cluster:
        for worker in cluster.workers:
            worker.status.num_blocks, worker.status.block_size = 100, 16
            ledger = pb.BlockLedger(free=40, cached=30, held=15, in_flight=5, promised=10)
            worker.status.blocks.CopyFrom(ledger)
            worker.status.max_model_len = MAX_MODEL_LEN
        async with start_router(cluster, inactivity_s=8.0, **config) as router:
            yield cluster, router


async def send(page: Page, text: str = "Capital of France?") -> None:
    await page.get_by_label("Your message").fill(text)
    await page.get_by_role("button", name="Send").click()


async def test_a_chat_streams_and_is_explained(
    browser: Browser, start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        hosts_apart(answer, start_router, num_prefills=1) as (cluster, router),
        page_at(browser, router.url) as page,
    ):
        await live(page)
        for worker in cluster.workers:
            worker.status.max_model_len = MAX_MODEL_LEN
        await until(lambda: router.router.workers.max_model_len == MAX_MODEL_LEN)
        relay_timed(cluster)
        await send(page)
        await expect(page.locator(".answer-text")).to_have_text("Paris 🌍 is it.")
        await page.wait_for_selector(".waterfall")
        (told,) = (await router.http.get("/v1/requests")).json()["data"]
        told = (await router.http.get(f"/v1/requests/{told['id']}")).json()
        first, rest = await bars(page, "article.assistant")
        check_bar(first, told["parts_ms"], told["residual_ms"], told["total_ms"])
        check_bar(rest, told["rest_parts_ms"], told["rest_residual_ms"], told["rest_ms"])
        stages = await page.locator("article.assistant .gantt li").evaluate_all(
            "rows => rows.map(row => row.dataset.stage)"
        )
        assert {"queue", "build", "ship", "install", "attach", "decode"} <= set(stages)

        await page.locator(".row").click()
        sheet = page.get_by_role("dialog", name="Request")
        await expect(sheet.get_by_role("heading", name="Attempt 1: done")).to_be_visible()
        await expect(sheet).to_contain_text("4.1 kB")
        await expect(sheet).to_contain_text("posix")
        again = await bars(page, "#detail-body")
        assert [one["parts"] for one in again] == [first["parts"], rest["parts"]]
        async with page.expect_download() as downloading:
            await sheet.get_by_role("button", name="Perfetto").click()
        assert (await downloading.value).suggested_filename.endswith(".json")
        await page.keyboard.press("Escape")
        await expect(page.locator(".row")).to_be_focused()


def check_bar(
    drawn: dict[str, Any], parts: dict[str, float], residual: float, total: float
) -> None:
    """What is drawn is what the router says, and adds up to it, as numbers and as lengths."""
    assert drawn["parts"] == pytest.approx({**parts, "residual": residual})
    assert sum(drawn["parts"].values()) == pytest.approx(drawn["total"], abs=1e-6)
    assert drawn["total"] == pytest.approx(total)
    whole = sum(drawn["widths"])
    for width, ms in zip(drawn["widths"], drawn["parts"].values(), strict=True):
        assert width / whole == pytest.approx(ms / total, abs=0.02)


async def test_tokens_are_seen_as_they_come_and_can_be_stopped(
    browser: Browser, start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        relay(answer, start_router) as (cluster, router),
        page_at(browser, router.url, reduced_motion="reduce") as page,
    ):
        await live(page)

        left = asyncio.Event()

        async def half(call: GenerateCall) -> None:
            await call.relay.commit(await call.reserve())
            await call.tokens(0, answer[:5])
            await call.beating(left.wait())

        for worker in cluster.decodes:
            worker.scripts.append(half)
        await send(page)
        text = page.locator(".answer-text")
        await expect(text).to_have_text("Paris")
        await expect(page.locator("article.assistant")).to_have_attribute("aria-busy", "true")
        await expect(page.locator("#line")).to_have_text("1 prompt being served")
        assert await page.locator(".baton").count() == 0, "nothing moves for who wants it so"
        await page.get_by_role("button", name="Stop").click()
        await until(lambda: router.metric("baton_requests_total", outcome="cancelled") == 1)
        left.set()
        await expect(page.locator(".answer-note")).to_contain_text("Stopped.")
        await expect(page.locator(".row-state")).to_have_text("cancelled")
        await page.wait_for_selector(".waterfall")
        await expect(page.get_by_label("Your message")).to_be_focused()
        for worker in cluster.decodes:
            worker.scripts.clear()
        await page.get_by_text("Sampling").click()
        await page.get_by_label("System prompt").fill("Be brief.")
        await page.get_by_label("Seed").fill("7")
        await page.get_by_label("Temperature").fill("0")
        await send(page, "<b>And</b> of Spain?")
        await expect(page.locator(".answer-text").last).to_have_text("Paris 🌍 is it.")
        sampling = [call for worker in cluster.decodes for call in worker.requests][-1].sampling
        assert (sampling.seed, sampling.temperature, sampling.max_tokens) == (7, 0, 200)
        await expect(page.locator(".said.user").last).to_have_text("You<b>And</b> of Spain?")


async def test_a_worker_goes_and_then_the_router(
    browser: Browser, start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        relay(answer, start_router) as (cluster, router),
        door_to(router.url) as door,
        page_at(browser, door.url) as page,
    ):
        await live(page)
        await expect(page.locator(".worker[data-ready=true]")).to_have_count(4)
        await cluster.decodes[1].kill()
        notices = page.locator("#notices")
        await expect(notices).to_contain_text("decode-1 takes no requests")
        dead = page.locator(".worker[data-ready=false]")
        await expect(dead).to_contain_text("decode-1")
        await expect(dead).to_contain_text("gone: its process does not answer")
        for theme in ("light", "dark"):
            await page.emulate_media(color_scheme=theme)
            assert not await faults(page)
        await cluster.decodes[1].start()
        await expect(notices).to_contain_text("decode-1 is back")
        await expect(dead).to_have_count(0)

        await door.shut()
        await expect(page.locator("#link-text")).to_have_text("Reconnecting")
        await expect(notices).to_contain_text("tries again by itself")
        await send(page)
        await expect(page.get_by_role("alert")).to_have_text("The router does not answer.")
        await door.open()
        await expect(page.locator("#link-text")).to_have_text("Live")
        await expect(notices).not_to_contain_text("tries again")


@pytest.mark.parametrize("viewport", [{"width": 1440, "height": 900}, PHONE], ids=["desk", "phone"])
async def test_it_is_there_for_everybody(
    browser: Browser, start_router: StartRouter, answer: Sequence[int], viewport: dict[str, int]
) -> None:
    """axe-core finds no fault, nothing is wider than the screen, and all of it works by keys."""
    async with (
        relay(answer, start_router) as (_, router),
        page_at(browser, router.url, viewport=viewport) as page,
    ):
        await live(page)
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the prompt")).to_be_focused()
        await page.keyboard.press("Enter")
        await page.get_by_label("Your message").focus()
        await page.keyboard.type("Capital of France?")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".waterfall")
        await page.get_by_text("Sampling").click()
        for theme in ("light", "dark"):  # auto is light here: each of them once
            button = page.get_by_role("button", name="Theme:")
            await button.click()
            await expect(button).to_have_accessible_name(f"Theme: {theme}")
            assert not await faults(page)
        assert await page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        await page.locator(".row").first.focus()
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#detail-body .waterfall")
        assert not await faults(page)
        width = await page.evaluate("document.getElementById('detail').scrollWidth")
        assert width <= viewport["width"]


async def test_a_key_is_asked_for_and_kept_in_the_tab(
    browser: Browser, start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        relay(answer, start_router, api_keys=lines()) as (_, router),
        page_at(browser, router.url) as page,
    ):
        await page.get_by_role("button", name="Give a key").click()
        await page.get_by_label("Key", exact=True).fill(KEY)
        await page.get_by_role("button", name="Use it").click()
        await expect(page.locator("#link-text")).to_have_text("Chat only")
        await send(page)
        await page.wait_for_selector(".waterfall")
        await expect(page.locator(".row")).to_have_count(1)
        await page.get_by_role("button", name="API key").click()
        await page.get_by_label("Key", exact=True).fill(OPERATOR)
        await page.keyboard.press("Enter")
        await live(page)
        await expect(page.locator(".worker[data-ready=true]")).to_have_count(4)
        stored = await page.evaluate("[{...sessionStorage}, {...localStorage}]")
        assert stored == [{"baton-key": OPERATOR}, {}]
