"""How long a template may take on the wall. In the phase of the tests that runs alone."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from router.chat_template import ChatTemplate
from router.template_process import TemplateProcess, TemplateRefused
from router.template_sandbox import MAX_CPU_S, MAX_WALL_S
from router.tokenizer import TextTokenizer
from tests.router.conftest import StartRouter
from tests.router.fake_workers import fake_cluster
from tests.router.test_refusals import error_of
from tests.router.test_template_process import LOOPS, of_children_s


def running(source: str) -> tuple[TemplateProcess, int]:
    """And its process id: it has rendered something."""
    process = TemplateProcess(source)
    process.render({"n": 1})
    assert process._process is not None
    return process, process._process.pid


def seconds_to_refuse(process: TemplateProcess) -> float:
    began = time.monotonic()
    with pytest.raises(TemplateRefused, match="too much time"):
        process.render({"n": 99_999})
    return time.monotonic() - began


def test_a_bomb_is_refused_within_a_second() -> None:
    process, pid = running(LOOPS)
    used = psutil.Process(pid).cpu_times()
    before = of_children_s() + used.user + used.system
    assert seconds_to_refuse(process) < 1.0
    assert of_children_s() - before < MAX_CPU_S + 0.1


def test_however_little_it_gets_of_a_processor() -> None:
    """Of one that it shares with somebody who has nearly all of it, its half second of processor
    time would take half a minute."""
    process, pid = running(LOOPS)
    core = min(os.sched_getaffinity(0))
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for one in (pid, other.pid):
            os.sched_setaffinity(one, {core})
        os.setpriority(os.PRIO_PROCESS, pid, 19)
        assert seconds_to_refuse(process) < 2 * MAX_WALL_S
    finally:
        other.kill()
        other.wait()


async def test_others_are_served_meanwhile(
    start_router: StartRouter,
    answer: Sequence[int],
    tokenizer: TextTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More bombs than there are threads for others' work: nobody waits for one of them."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    source = "{% set n = n|default(1) %}" + LOOPS + "{{ messages[0].content }}"
    monkeypatch.setattr(tokenizer, "chat_template", ChatTemplate(source, {}))
    kwargs = {"n": 99_999}
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        assert (await router.chat()).status_code == 200
        bombs = [asyncio.create_task(router.chat(chat_template_kwargs=kwargs)) for _ in range(3)]
        waits = []
        while not all(bomb.done() for bomb in bombs):
            began = time.monotonic()
            assert (await router.complete()).status_code == 200
            waits.append(time.monotonic() - began)
        for bomb in bombs:
            assert error_of(await bomb, 400)["param"] == "messages"
        assert max(waits) < MAX_CPU_S, "as long as a bomb"
        assert len(waits) > len(bombs), waits
        assert (await router.chat()).status_code == 200
