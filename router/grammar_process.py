"""The processes that compile grammars to judge them (router/grammar_sandbox.py), from outside.

A few, begun with the first grammar, each with a thread that asks it. One that was killed is begun
again at once. How long that takes counts against nobody: whoever has its turn waits for it.
"""

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from router.grammar_sandbox import MAX_WALL_S
from router.line_process import LineProcess, NotStarted, ProcessGone
from runtime.grammar import VocabularySource
from runtime.log import get_logger

log = get_logger()

_SANDBOX = "router.grammar_sandbox"
_PATIENCE_S = MAX_WALL_S + 0.05
"""It ends by itself before, unless it does not run at all."""
_TOO_LONG = "it takes too long to compile"
_FAILED = "it takes too much memory to compile, or the library fails at it"
# What a grammar alone can bring upon a process, and would again: that is worth remembering.
_CPU_TIME = -signal.SIGPROF
_CRASHES = tuple(
    -number
    for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
)


@dataclass(frozen=True, slots=True)
class Verdict:
    fault: str | None
    """None: workers can obey it."""
    lasts: bool = True
    """It would be the same at another time."""


class GrammarProcess(LineProcess):
    """One thread at a time."""

    def __init__(self, source: VocabularySource) -> None:
        super().__init__(_SANDBOX, source)

    def verdict_on(self, text: str) -> Verdict:
        """Raises NotStarted."""
        for _ in range(2):
            try:
                return Verdict(self.ask(text, _PATIENCE_S).get("refused"))
            except ProcessGone as gone:
                code = gone.code
            if code is None or code == -signal.SIGALRM:
                return Verdict(_TOO_LONG, lasts=False)  # by the clock, which others' work moves too
            if code == _CPU_TIME:
                return Verdict(_TOO_LONG)
            if code in _CRASHES or code > 0:
                return Verdict(_FAILED)
            # Somebody else killed it: that is no fault of the grammar's, unless it happens again.
        return Verdict(_FAILED, lasts=False)


class Compiler:
    """A process and its thread. What it is told is done in that order."""

    def __init__(self, source: VocabularySource) -> None:
        self._process = GrammarProcess(source)
        self._thread = ThreadPoolExecutor(1, "grammar-check")
        self._is_over = False

    def start(self, then: Callable[[], object] = lambda: None) -> None:
        """Unless it runs. `then` is called by its thread, whether it could or not."""
        if self._is_over:
            then()
        else:
            self._thread.submit(self._start, then)

    def judge(self, text: str) -> asyncio.Future[Verdict]:
        """Raises NotStarted."""
        if self._is_over:
            raise NotStarted
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._thread, self._process.verdict_on, text)

    def close(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._process.close_soon()
        self._thread.submit(self._process.close)
        self._thread.shutdown(wait=False)

    def _start(self, then: Callable[[], object]) -> None:
        try:
            self._process.start()
        except NotStarted as error:
            if not self._is_over:
                log.warning("no process to compile grammars", reason=str(error))
        with suppress(RuntimeError):  # the loop has ended meanwhile
            then()


class Compilers:
    """The pool. It belongs to one event loop."""

    def __init__(self, source: VocabularySource, num_processes: int) -> None:
        self._all = [Compiler(source) for _ in range(num_processes)]
        self._free: asyncio.Queue[Compiler] = asyncio.Queue()
        self._first: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        """Until one of them has started, or could not: once."""
        if self._first is None:
            loop = asyncio.get_running_loop()
            first = self._first = loop.create_future()

            def there() -> None:
                if not first.done():
                    first.set_result(None)

            for compiler in self._all:
                compiler.start(partial(loop.call_soon_threadsafe, there))
                self._free.put_nowait(compiler)
        await asyncio.shield(self._first)

    async def turn(self) -> Compiler:
        """Whoever has it must `give_back` it, or `judge` with it, in the same step of the loop."""
        return await self._free.get()

    def give_back(self, compiler: Compiler) -> None:
        compiler.start()
        self._free.put_nowait(compiler)

    async def judge(
        self, compiler: Compiler, text: str, keep: Callable[[Verdict], None]
    ) -> Verdict:
        """`keep` gets the verdict also if nobody waits for it any more. Raises NotStarted."""
        work = compiler.judge(text)

        def over(work: asyncio.Future[Verdict]) -> None:
            self.give_back(compiler)
            if work.exception() is None:
                keep(work.result())

        work.add_done_callback(over)
        return await asyncio.shield(work)

    def close(self) -> None:
        for compiler in self._all:
            compiler.close()
