"""Refuses grammars that no worker could obey, before any worker is asked.

The router compiles, and not the workers alone: a refusal then costs no worker anything, comes at
once even if none is ready, and the compiler's reason names the parameter. The workers compile the
same text with the same library under the same limits, so what passes here passes there.

Compiling releases the GIL and runs on threads of its own, few of them: the event loop, and the
threads that tokenize, stay free. What takes too long is refused; bounds and limits see to it that
the thread is free again soon. Verdicts are kept, by text.
"""

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from router.errors import BadRequest, CompilersBusy
from router.structured_output import Wanted
from runtime.grammar import GrammarError, Vocabulary

MAX_SECONDS = 0.9
"""For one grammar, waiting for a thread included."""
NUM_THREADS = 2
NUM_KEPT = 1024
_NUM_PROBED = 4
_UNKNOWN = "unknown"


class GrammarCheck:
    """See the module. `vocabulary` None: the tokenizer serves no grammars."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar-check")
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    async def text_of(self, wanted: Wanted) -> str:
        """The grammar's text, for the workers. Raises BadRequest with the reason, CompilersBusy."""
        if self._vocabulary is None:
            raise BadRequest(
                f"{wanted.param!r} cannot be served: this model's tokenizer is of a kind that "
                "grammars cannot use.",
                param=wanted.param,
            )
        job = _Job(wanted)
        work = asyncio.get_running_loop().run_in_executor(
            self._threads, self._check, self._vocabulary, job
        )
        try:
            async with asyncio.timeout(MAX_SECONDS):
                return await work
        except GrammarError as error:
            text = f"Invalid value for {wanted.param!r}: {error}."
            raise BadRequest(text, param=wanted.param) from error
        except TimeoutError as error:
            if not job.has_begun:
                raise CompilersBusy(MAX_SECONDS) from error
            text = f"Invalid value for {wanted.param!r}: it takes too long to compile."
            raise BadRequest(text, param=wanted.param) from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check(self, vocabulary: Vocabulary, job: "_Job") -> str:
        job.has_begun = True
        text = job.wanted.write()
        digest = hashlib.sha256(text.encode()).digest()
        fault = self._verdicts.pop(digest, _UNKNOWN)
        if fault == _UNKNOWN:
            fault = _fault(vocabulary, text)
        self._verdicts[digest] = fault  # the newest
        if len(self._verdicts) > NUM_KEPT:
            self._verdicts.popitem(last=False)
        if fault is not None:
            raise GrammarError(fault)
        return text


@dataclass(slots=True)
class _Job:
    wanted: Wanted
    has_begun: bool = False


def _fault(vocabulary: Vocabulary, text: str) -> str | None:
    try:
        probe(vocabulary, text)
    except GrammarError as error:
        return str(error)
    return None


def probe(vocabulary: Vocabulary, text: str) -> None:
    """Compiles it and walks its first steps: where nothing may come, or the limits stop it at once.
    Raises GrammarError."""
    grammar = vocabulary.compile(text)
    words = np.empty(vocabulary.row_size, dtype=np.int32)
    for _ in range(_NUM_PROBED):
        grammar.fill(words)
        if not words.any():
            raise GrammarError("no output can fit it")
        may_come = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        goes_on = [int(id) for id in may_come if int(id) not in vocabulary.end_token_ids]
        if not goes_on:
            return
        grammar.advance([goes_on[len(goes_on) // 2]])
