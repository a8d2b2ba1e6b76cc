"""Grammars are compiled apart: what one does to its process costs its own request, and no other."""

import asyncio
import gc
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from router import grammar_check, grammar_process
from router.errors import BadRequest, CompilersBusy
from router.grammar_check import NUM_PROCESSES, GrammarCheck
from router.grammar_process import GrammarProcess, Verdict
from router.grammar_sandbox import MAX_CPU_S, MAX_MEMORY_NBYTES
from router.structured_output import Wanted
from router.tokenizer import TextTokenizer
from runtime import grammar
from runtime.grammar import VocabularySource, of_ebnf, of_json_schema, of_regex
from tests.router.fake_workers import until

TOO_LONG = "takes too long to compile"
FAILED = "too much memory to compile"


@pytest.fixture
async def check(tokenizer: TextTokenizer) -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(tokenizer.vocabulary)
    yield check
    running = processes(check)
    check.close()
    await until(lambda: not any(one.is_running() for one in running))


@pytest.fixture
def strange(check: GrammarCheck) -> GrammarCheck:
    """It compiles as tests/router/strange_sandbox.py does."""
    assert check._compilers is not None
    for compiler in check._compilers._all:
        compiler._process._module = "tests.router.strange_sandbox"
    return check


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reached a process."""
    texts: list[str] = []
    real = GrammarProcess.verdict_on

    def verdict_on(process: GrammarProcess, text: str) -> Verdict:
        texts.append(text)
        return real(process, text)

    monkeypatch.setattr(GrammarProcess, "verdict_on", verdict_on)
    return texts


def processes(check: GrammarCheck) -> list[psutil.Process]:
    assert check._compilers is not None
    started = [compiler._process._process for compiler in check._compilers._all]
    running = {one.pid for one in started if one is not None and one.poll() is None}
    return [one for one in psutil.Process().children() if one.pid in running]


async def told(check: GrammarCheck, text: str) -> str:
    return await check.text_of(Wanted("guided_grammar", lambda: text))


async def refusal(check: GrammarCheck, text: str) -> str:
    with pytest.raises(BadRequest) as refused:
        await told(check, text)
    assert refused.value.param == "guided_grammar"
    return refused.value.message


async def test_what_the_library_never_comes_back_from(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the bounds that know these."""
    monkeypatch.setattr(grammar, "_UNFORCED", "")
    parts = [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]
    bombs = of_ebnf('root ::= x root\nx ::= "a"*'), of_json_schema({"allOf": parts}, {})
    for outcome in await asyncio.gather(*(refusal(check, bomb) for bomb in bombs)):
        assert TOO_LONG in outcome
    assert await told(check, of_regex("a+")) == of_regex("a+")


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        *((deed, TOO_LONG) for deed in ("spins", "sleeps")),
        *((deed, FAILED) for deed in ("fills", "exits")),
        *((f"dies SIG{name}", FAILED) for name in ("SEGV", "ABRT", "BUS", "KILL")),
        ("refuses", "so says the test"),
        ("is bounded", "bounded"),
    ],
)
async def test_it_is_refused_and_others_are_served(
    strange: GrammarCheck, deed: str, reason: str
) -> None:
    bad = asyncio.create_task(refusal(strange, deed))
    goods = [asyncio.create_task(told(strange, f"good {i}")) for i in range(20)]
    assert await asyncio.gather(*goods) == [f"good {i}" for i in range(20)]
    assert reason in await bad
    await until(lambda: len(processes(strange)) == NUM_PROCESSES)  # before anybody asks again
    assert await told(strange, "after it") == "after it"


@pytest.mark.parametrize(
    ("deed", "lasts"),
    [("dies SIGPROF", True), ("dies SIGSEGV", True), ("sleeps", False), ("good", True)],
)
async def test_what_a_grammar_would_do_again_is_remembered(
    strange: GrammarCheck, asked: list[str], deed: str, lasts: bool
) -> None:
    for _ in range(2):
        if deed == "good":
            await told(strange, deed)
        else:
            await refusal(strange, deed)
    assert asked == [deed] * (1 if lasts else 2)


async def test_nobody_is_refused_while_the_first_process_starts(
    strange: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_SECONDS", 0.2)
    real = GrammarProcess.start

    def start(process: GrammarProcess) -> None:
        time.sleep(0.5)
        real(process)

    with monkeypatch.context() as patch:
        patch.setattr(GrammarProcess, "start", start)
        goods = [asyncio.create_task(told(strange, f"{i}")) for i in range(4 * NUM_PROCESSES)]
        await asyncio.sleep(0.4)
    assert len(await asyncio.gather(*goods)) == len(goods)


async def test_what_a_library_prints_is_no_answer(strange: GrammarCheck) -> None:
    for text in ("prints", "first", "second"):
        assert await told(strange, text) == text


async def test_many_who_ask_the_same_cost_few_compilations(
    strange: GrammarCheck, asked: list[str]
) -> None:
    await asyncio.gather(*(refusal(strange, "refuses") for _ in range(50)))
    assert len(asked) <= NUM_PROCESSES


async def test_who_waits_for_its_turn_gets_it(
    strange: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_SECONDS", 20)
    bad = [asyncio.create_task(refusal(strange, "spins")) for _ in range(NUM_PROCESSES)]
    await asyncio.sleep(0.1)
    assert await told(strange, "good") == "good"
    assert all(TOO_LONG in outcome for outcome in await asyncio.gather(*bad))


async def test_who_waits_too_long_may_come_again(
    strange: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_SECONDS", 0.1)
    assert await told(strange, "first") == "first"
    bad = [asyncio.create_task(refusal(strange, "sleeps")) for _ in range(NUM_PROCESSES)]
    await asyncio.sleep(0.05)
    with pytest.raises(CompilersBusy):
        await told(strange, "good")
    await asyncio.gather(*bad)
    assert await told(strange, "good") == "good"


async def test_who_leaves_takes_no_process_along(strange: GrammarCheck) -> None:
    await told(strange, "first")
    left = [asyncio.create_task(told(strange, "takes 0.3")) for _ in range(2 * NUM_PROCESSES)]
    await asyncio.sleep(0.1)
    for one in left:
        one.cancel()
    outcomes = await asyncio.gather(*left, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
    await until(lambda: len(strange._verdicts) > 1)  # the one that somebody began is known
    assert await told(strange, "good") == "good"


async def test_killed_between_requests_and_in_the_middle(
    strange: GrammarCheck, tmp_path: Path
) -> None:
    """By somebody: nobody's request is refused for it."""
    assert not processes(strange), "not before the first grammar"
    assert await told(strange, "first") == "first"
    await until(lambda: len(processes(strange)) == NUM_PROCESSES)
    for killed in (before := processes(strange)):
        killed.send_signal(signal.SIGKILL)
    assert await told(strange, "second") == "second"
    assert await told(strange, f"dies once {tmp_path / 'there'}") != ""
    await until(lambda: len(processes(strange)) == NUM_PROCESSES)
    assert not set(processes(strange)) & set(before)


async def test_one_that_does_not_run_is_given_up(
    strange: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("first", "second"):  # they take turns: both are ready then
        assert await told(strange, text) == text
    monkeypatch.setattr(grammar_process, "_PATIENCE_S", 0.2)
    for stopped in processes(strange):
        stopped.send_signal(signal.SIGSTOP)
    assert TOO_LONG in await refusal(strange, "x" * (1 << 18))  # more than a pipe holds
    assert TOO_LONG in await refusal(strange, "third")
    monkeypatch.undo()
    assert await told(strange, "third") == "third"


async def test_what_the_kernel_allows_it(check: GrammarCheck) -> None:
    await told(check, of_regex("a"))
    process = processes(check)[0]
    beside, _ = process.rlimit(psutil.RLIMIT_AS)
    assert MAX_MEMORY_NBYTES < beside < MAX_MEMORY_NBYTES + (1 << 30)
    assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
    await asyncio.sleep(0.1)  # it has answered, but may not sleep yet
    used = process.cpu_times().user
    await asyncio.sleep(0.3)
    assert process.cpu_times().user == used, "idle"


async def test_a_vocabulary_that_is_gone_is_nobodys_fault(tmp_path: Path) -> None:
    class Gone:
        source = VocabularySource(str(tmp_path / "gone"), 320, ())

    check = GrammarCheck(Gone())  # type: ignore[arg-type]
    with pytest.raises(CompilersBusy):
        await told(check, of_regex("a"))
    check.close()


async def test_it_ends_with_its_owner(tokenizer: TextTokenizer) -> None:
    owned = [GrammarCheck(tokenizer.vocabulary)]
    await told(owned[0], of_regex("a"))
    await until(lambda: len(processes(owned[0])) == NUM_PROCESSES)
    running = processes(owned[0])
    owned.clear()
    gc.collect()
    await until(lambda: not any(one.is_running() for one in running))


async def test_close_while_it_works(
    tokenizer: TextTokenizer, strange: GrammarCheck, asked: list[str]
) -> None:
    at_once = GrammarCheck(tokenizer.vocabulary)
    starting = asyncio.create_task(told(at_once, of_regex("a")))
    busy = asyncio.create_task(told(strange, "sleeps"))
    await until(lambda: "sleeps" in asked)
    running = processes(strange)
    at_once.close()
    strange.close()
    outcomes = await asyncio.gather(starting, busy, return_exceptions=True)
    assert isinstance(outcomes[1], CompilersBusy)
    assert outcomes[0] == of_regex("a") or isinstance(outcomes[0], CompilersBusy)
    await until(lambda: not any(one.is_running() for one in running))
    await until(lambda: not processes(at_once))  # killed as soon as it has started


OWNER = """
import asyncio, sys
from pathlib import Path
from router.grammar_check import GrammarCheck
from router.structured_output import Wanted
from router.tokenizer import TextTokenizer

async def main():
    check = GrammarCheck(TextTokenizer.from_folder(Path(sys.argv[1])).vocabulary)
    for compiler in check._compilers._all:
        compiler._process._module = "tests.router.strange_sandbox"
    for text in ("first", "second"):
        await check.text_of(Wanted("x", lambda: text))
    print(flush=True)
    await check.text_of(Wanted("x", lambda: "spins"))

asyncio.run(main())
"""


def test_it_ends_with_a_router_that_is_killed(model_folder: Path) -> None:
    """The one that is idle at once, the one that works when its time is over."""
    command = [sys.executable, "-c", OWNER, str(model_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        running = psutil.Process(owner.pid).children()
        time.sleep(MAX_CPU_S / 4)
        owner.kill()
    assert len(running) == NUM_PROCESSES
    assert not psutil.wait_procs(running, timeout=20)[1]
