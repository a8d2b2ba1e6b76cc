"""Refuses grammars that no worker could obey, before any worker is asked.

The router compiles, and not the workers alone: a refusal then costs no worker anything, comes at
once even if none is ready, and the compiler's reason names the parameter. The workers compile the
same text with the same library under the same limits, so what passes here passes there.

A grammar is written as text on a thread of a few, and compiled in a process of a few
(router/grammar_process.py), which is killed if bounds and limits do not stop the compiler. Verdicts
are kept, by text.
"""

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from router.errors import BadRequest, CompilersBusy
from router.grammar_process import Compilers, Verdict
from router.line_process import START_S, NotStarted
from router.structured_output import Wanted
from runtime.grammar import GrammarError, Vocabulary

MAX_SECONDS = 0.9
"""For writing one grammar, and for its turn with a process, which then bounds itself to as much."""
NUM_THREADS = 2
NUM_PROCESSES = 2
NUM_KEPT = 1024


class GrammarCheck:
    """See the module. `vocabulary` None: the tokenizer serves no grammars."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._compilers: Compilers | None = None
        if vocabulary is not None:
            self._compilers = Compilers(vocabulary.source, NUM_PROCESSES)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar-check")
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    async def text_of(self, wanted: Wanted) -> str:
        """The grammar's text, for the workers. Raises BadRequest with the reason, CompilersBusy."""
        if self._compilers is None:
            raise BadRequest(
                f"{wanted.param!r} cannot be served: this model's tokenizer is of a kind that "
                "grammars cannot use.",
                param=wanted.param,
            )
        job = _Job(wanted)
        try:
            verdict = await self._verdict(self._compilers, job)
        except GrammarError as error:
            verdict = Verdict(str(error))
        except TimeoutError as error:
            if not job.is_under_way:
                raise CompilersBusy(MAX_SECONDS) from error
            verdict = Verdict("it takes too long to compile")
        except NotStarted as error:
            raise CompilersBusy(START_S) from error
        if verdict.fault is not None:
            text = f"Invalid value for {wanted.param!r}: {verdict.fault}."
            raise BadRequest(text, param=wanted.param)
        return job.text

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._compilers is not None:
            self._compilers.close()

    async def _verdict(self, compilers: Compilers, job: "_Job") -> Verdict:
        """Raises GrammarError, TimeoutError, NotStarted."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(MAX_SECONDS):
            digest = await loop.run_in_executor(self._threads, job.run)
        if (known := self._known(digest)) is not None:
            return known
        await compilers.begin()
        async with asyncio.timeout(MAX_SECONDS):
            compiler = await compilers.turn()
        if (known := self._known(digest)) is not None:  # it was others' too, who came before
            compilers.give_back(compiler)
            return known
        return await compilers.judge(compiler, job.text, partial(self._keep, digest))

    def _known(self, digest: bytes) -> Verdict | None:
        known = self._verdicts.get(digest)
        if known is not None:
            self._verdicts.move_to_end(digest)
        return known

    def _keep(self, digest: bytes, verdict: Verdict) -> None:
        if verdict.lasts:
            self._verdicts[digest] = verdict
            if len(self._verdicts) > NUM_KEPT:
                self._verdicts.popitem(last=False)


@dataclass(slots=True)
class _Job:
    """The writing of a grammar."""

    wanted: Wanted
    is_under_way: bool = False
    text: str = ""

    def run(self) -> bytes:
        """The text's digest. Raises GrammarError."""
        self.is_under_way = True
        self.text = self.wanted.write()
        digest = hashlib.sha256(self.text.encode()).digest()
        self.is_under_way = False
        return digest
