"""`python -m router` as a process: what it says, and how it ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from tests.router.fake_workers import FakeCluster, GenerateCall, fake_cluster


@asynccontextmanager
async def router_process(
    cluster: FakeCluster, model_folder: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--port", str(port), "--served-model-name", "tiny"),
        *("--model-path", str(model_folder), "--shutdown-grace-s", "0.5"),
        *("--decode", cluster.decodes[0].address, "--prefill", cluster.prefills[0].address),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            await until_ready(http)
            yield process, http
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_ready(http: httpx.AsyncClient) -> None:
    for _ in range(400):
        try:
            if (await http.get("/readyz")).status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        await asyncio.sleep(0.05)
    raise TimeoutError("the router did not become ready")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_soon_and_tells_open_requests(
    model_folder: Path, answer: Sequence[int], signum: signal.Signals
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        router_process(cluster, model_folder) as (process, http),
    ):

        async def endless(call: GenerateCall) -> None:
            await call.relay.commit(await call.reserve())
            await call.tokens(0, answer[:3])
            await call.beating(asyncio.Event().wait())

        cluster.decodes[0].scripts.append(endless)
        body = {"model": "tiny", "prompt": "Hi", "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            started = time.monotonic()
            process.send_signal(signum)
            rest = [line async for line in lines if line]
        assert "shutting_down" in rest[-1]
        assert await process.wait() == 0
        assert time.monotonic() - started < 5


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
    return subprocess.run(
        [sys.executable, "-m", "router", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment,
        check=False,
    )


def test_help_teaches() -> None:
    text = run("--help").stdout
    for word in ("--decode", "--prefill", "colocated", "/readyz", "Example"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "--decode"),
        (("--decode", "127.0.0.1:1"), "--prefill"),
        (("--decode", "127.0.0.1:1", "--prefill", "127.0.0.1:2"), "tokenizer"),
    ],
)
def test_what_it_cannot_start_with(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    done = run("--model-path", str(tmp_path), "--served-model-name", "tiny", *arguments)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
