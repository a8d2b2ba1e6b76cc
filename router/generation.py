"""The answers to one request as pieces of text: dispatch below, HTTP above.

Runs the request's prompts at the same time. Tokens become text token by token, so that an answer
ends at the very token that completes a stop string. A prompt that fails fails the request.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from router.detokenizer import Detokenizer
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics, TokenTimer
from router.request import FinishReason, ValidRequest
from router.stop import StopStrings
from router.tasks import cancel_and_wait
from router.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """More of one choice."""

    index: int
    """Of the choice: its prompt's."""
    text: str
    """Empty only in a choice's last piece."""
    num_tokens: int
    """Output tokens of the choice so far."""
    num_cached_tokens: int
    """Prompt tokens of the choice that a worker had cached."""
    finish_reason: FinishReason | None
    """Set in the last piece of a choice, and only there."""


class Choice:
    """Turns the tokens of one prompt into pieces (its `deliver` is a `progress.Deliver`)."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        min_tokens: int,
        timer: TokenTimer,
        emit: Callable[[Piece], None],
    ) -> None:
        self._index = index
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._timer = timer
        self._emit = emit
        self._num_tokens = 0
        self._num_cached_tokens = 0

    def note_cached(self, num_tokens: int) -> None:
        self._num_cached_tokens = num_tokens

    def deliver(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> bool:
        before = self._num_tokens
        text = self._push_all(token_ids)
        if self._num_tokens > before:
            self._timer.tokens(self._num_tokens - before)
        if finish_reason is not None and not self._stops.is_hit:
            text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        if self._stops.is_hit:
            finish_reason = FinishReason.STOP
        if finish_reason is not None:
            self._timer.finished()
        if text or finish_reason is not None:
            counts = self._num_tokens, self._num_cached_tokens
            self._emit(Piece(self._index, text, *counts, finish_reason))
        return finish_reason is None

    def _push_all(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            self._num_tokens += 1
            certain = self._detokenizer.push(token_id)
            if self._num_tokens <= self._min_tokens:  # stop strings are looked for behind them
                text += certain
                continue
            text += self._stops.push(certain)
            if self._stops.is_hit:
                break
        return text


async def generate(
    request: ValidRequest,
    dispatcher: Dispatcher,
    tokenizer: TextTokenizer,
    metrics: RouterMetrics,
    arrived: float,
) -> AsyncGenerator[Piece, None]:
    """Pieces of all choices as they come. Raises ApiError. Closing it cancels what still runs,
    and waits for that. `arrived`: when the request was read, by time.monotonic."""
    # Unbounded, but never more than `max_tokens` of each prompt: a slow client does not keep
    # blocks busy on the workers.
    outbox: asyncio.Queue[Piece | Exception] = asyncio.Queue()
    metrics.prompt_tokens.inc(request.num_prompt_tokens)
    choices = [
        Choice(
            index,
            tokenizer.detokenizer(),
            request.stop,
            prompt.sampling.min_tokens,
            TokenTimer(metrics, arrived),
            outbox.put_nowait,
        )
        for index, prompt in enumerate(request.prompts)
    ]
    prompts = asyncio.create_task(_run_all(request, choices, dispatcher, outbox))
    try:
        num_open = len(choices)
        while num_open:
            item = await outbox.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item.finish_reason is not None
            yield item
        await prompts
    finally:
        await cancel_and_wait(prompts)


async def _run_all(
    request: ValidRequest,
    choices: Sequence[Choice],
    dispatcher: Dispatcher,
    outbox: asyncio.Queue[Piece | Exception],
) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for prompt, choice in zip(request.prompts, choices, strict=True):
                group.create_task(dispatcher.run(prompt, choice.deliver, choice.note_cached))
    except* Exception as failures:  # noqa: BLE001 (raised again where the pieces are awaited)
        outbox.put_nowait(_first(failures))


def _first(failure: Exception) -> Exception:
    while isinstance(failure, ExceptionGroup):
        failure = failure.exceptions[0]
    return failure
