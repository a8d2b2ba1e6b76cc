"""An engine over the tiny model that has text, for structured outputs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.request import (
    EngineRequest,
    FinishReason,
    Leg,
    RequestFailed,
    RequestId,
    SamplingParams,
)
from runtime.grammar import Grammar
from tests.engine.listener import Listener
from tests.engine.tp.threaded_ranks import other_ranks
from tests.text_model import text_vocabulary

MAX_TOKENS = 400
PROMPT = tuple((7 * i + 3) % 300 for i in range(21))


class Rig:
    """An engine over the text model, and what it says."""

    def __init__(self, engine: Engine, listener: Listener, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.listener = listener
        self._tokenizer = tokenizer

    def request(self, name: str, grammar: str, **changes: object) -> EngineRequest:
        outputs = changes.pop("outputs", ())
        params = {"max_tokens": MAX_TOKENS, "grammar": grammar, **changes}
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        assert isinstance(outputs, tuple)
        return EngineRequest(RequestId(name), Leg.LOCAL, PROMPT, sampling, outputs)

    def run(self, *requests: EngineRequest) -> list[tuple[int, ...]]:
        for request in requests:
            self.engine.submit(request)
        for request in requests:
            assert self.listener.wait_ended(request.request_id), self.failure(request)
        return [self.listener.tokens(request.request_id) for request in requests]

    def finish_reason(self, request: EngineRequest) -> FinishReason | None:
        return self.listener.wait_ended(request.request_id)

    def failure(self, request: EngineRequest) -> list[RequestFailed]:
        return self.listener.of(RequestFailed, request.request_id)

    def text(self, token_ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(list(token_ids))


Start = Callable[..., Rig]


@contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """Rigs with what flags a test wants; they end with the block."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with ExitStack() as stack:

        def start(**flags: object) -> Rig:
            engine, listener = stack.enter_context(_engine(folder, **flags))
            return Rig(engine, listener, tokenizer)

        yield start


@contextmanager
def _engine(folder: Path, **flags: object) -> Iterator[tuple[Engine, Listener]]:
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "num_blocks": 256,
        "num_threads": 1,
        **flags,
    }
    config = EngineConfig(folder, **settings)  # type: ignore[arg-type]
    listener = Listener()
    with other_ranks(config) as ranks:
        engine = Engine(config, listener, vocabulary=text_vocabulary(folder), ranks=ranks)
        engine.start()
        try:
            yield engine, listener
        finally:
            engine.stop()
            assert engine.failure is None


def may_come(grammar: Grammar) -> list[int]:
    words = np.empty(grammar.vocabulary.row_size, dtype=np.int32)
    grammar.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
