"""The grammars of an engine's samples: compiled beside the engine thread, masks filled beside the
forward pass.

1. `prepare`, on any thread: the compiling thread makes a `SampleGrammar` of a request's grammar and
   its delivered outputs, and hands it to `on_ready`, while the request queues or its KV comes.
2. `begin`, on the engine thread, before the forward pass of a step: the filling thread takes what
   the samples have put out since, and fills one set of token ids for each.
3. `MaskFill.result`, when the logits are there. By then the masks have long been ready: one takes
   microseconds, the forward pass milliseconds.

No compiled grammar is kept for the next request. It would save less than a millisecond of most, and
the library's copies of one share what its limits count: requests with equal grammars, one after the
other or at the same time, would use up each other's allowance, and in the end all would fail.

Two threads, so that no compiling ever delays a mask; both sleep when there is nothing to do, and
neither exists before the first grammar.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from engine.errors import EngineError, EngineStopped, InvalidRequest
from engine.logit_rules import Words
from engine.request import EngineRequest
from engine.sample_grammar import SampleGrammar
from engine.thread_priority import lower_priority
from runtime.grammar import GrammarError, Vocabulary

logger = logging.getLogger(__name__)

OnReady = Callable[[SampleGrammar | EngineError], None]
FillRow = tuple[SampleGrammar, list[int]]
"""A sample, and its outputs behind `num_taken`."""


class MaskFill:
    """The masks of one step, being filled."""

    def __init__(self, future: "Future[npt.NDArray[np.int32]]") -> None:
        self._future = future

    def result(self) -> list[Words]:
        """One for each row of `begin`, in order."""
        return list(self._future.result())


class Grammars:
    """See the module. `vocabulary` None: this engine knows no text, and refuses grammars."""

    def __init__(self, vocabulary: Vocabulary | None, nice: int = 0) -> None:
        self._vocabulary = vocabulary
        self._compiling = _thread("engine-grammar", nice)
        self._filling = _thread("engine-masks", nice)

    def check_served(self, request: EngineRequest) -> None:
        """Raises InvalidRequest if it has a grammar and none can be compiled here."""
        if request.sampling.grammar and self._vocabulary is None:
            raise InvalidRequest("this model's tokenizer is of a kind that grammars cannot use")

    def prepare(self, request: EngineRequest, on_ready: OnReady) -> None:
        """`on_ready` is called once, on the compiling thread; with InvalidRequest if the grammar
        does not compile or the outputs do not fit it. Raises EngineStopped."""
        assert self._vocabulary is not None, "check_served comes first"
        try:
            self._compiling.submit(self._prepare, self._vocabulary, request, on_ready)
        except RuntimeError as error:  # closed
            raise EngineStopped("the engine has stopped") from error

    def begin(self, rows: Sequence[FillRow]) -> MaskFill:
        """Engine thread; `rows` are not empty, and theirs alone until the result is there."""
        assert self._vocabulary is not None
        masks = np.empty((len(rows), self._vocabulary.row_size), dtype=np.int32)
        return MaskFill(self._filling.submit(_fill, rows, masks))

    def close(self) -> None:
        """What is being compiled goes nowhere. Idempotent."""
        for thread in (self._compiling, self._filling):
            thread.shutdown(wait=True, cancel_futures=True)

    def _prepare(self, vocabulary: Vocabulary, request: EngineRequest, on_ready: OnReady) -> None:
        try:
            grammar = vocabulary.compile(request.sampling.grammar)
            on_ready(SampleGrammar.rebuilt(grammar, request.sampling, request.output_token_ids))
        except GrammarError as error:
            on_ready(InvalidRequest(f"the grammar cannot be used: {error}"))
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            on_ready(EngineError(repr(error)))


def _fill(rows: Sequence[FillRow], masks: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    for (sample, new_token_ids), words in zip(rows, masks, strict=True):
        sample.fill(new_token_ids, words)
    return masks


def _thread(name: str, nice: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, name, initializer=lower_priority, initargs=(nice,))
