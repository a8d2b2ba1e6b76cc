"""The answers to one request as pieces of text: dispatch below, HTTP above.

Runs the request's prompts at the same time; each gives its samples (router/choice.py). A prompt
that fails fails the request.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from router.choice import Choice, Piece, PromptTold
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics, TokenTimer
from router.outbox import Outbox
from router.record import PromptRecord, RequestRecord, SampleTold
from router.request import TokenLogprobs, ValidPrompt, ValidRequest
from router.tasks import cancel_and_wait
from router.tokenizer import TextTokenizer


async def generate(
    request: ValidRequest,
    dispatcher: Dispatcher,
    tokenizer: TextTokenizer,
    metrics: RouterMetrics,
    record: RequestRecord,
) -> AsyncGenerator[Sequence[Piece | PromptTold], None]:
    """Pieces of all samples as they come, all that have come at a time; at the end what was told
    of each prompt. Raises ApiError. Closing it cancels what still runs, and waits for that.
    `record` has a prompt for each of the request's."""
    # Never more than `max_tokens` of each sample: a slow client does not keep blocks busy on the
    # workers.
    outbox: Outbox[Piece | Exception] = Outbox()
    metrics.prompt_tokens.inc(request.num_prompt_tokens)
    indices = itertools.count()
    choices = [
        [
            Choice(
                next(indices),
                tokenizer.detokenizer(request.shown_token_ids),
                request.stop,
                prompt.sampling.min_tokens,
                TokenTimer(metrics, record.read_ns / 1e9, told.first_token),
                outbox.put,
                keeps_stop=request.keeps_stop,
                keeps_tokens=request.has_token_ids,
            )
            for _ in range(prompt.num_samples)
        ]
        for prompt, told in zip(request.prompts, record.prompts, strict=True)
    ]
    for told, samples in zip(record.prompts, choices, strict=True):
        told.samples = partial(_told, samples)

    prompts = [
        asyncio.create_task(_run(prompt, samples, dispatcher, outbox, told))
        for prompt, samples, told in zip(request.prompts, choices, record.prompts, strict=True)
    ]
    try:
        num_open = sum(map(len, choices))
        while num_open:
            come = await outbox.take()
            pieces = [item for item in come if isinstance(item, Piece)]
            num_open -= sum(piece.finish_reason is not None for piece in pieces)
            if pieces:
                yield pieces
            if num_open or request.wants_prompt_logprobs:  # else nothing more is wanted
                _raise_failure(come)
        prompt_logprobs = await asyncio.gather(*prompts)
        if request.wants_prompt_logprobs:
            _raise_failure(outbox.take_now())
            yield [PromptTold(index, tuple(told)) for index, told in enumerate(prompt_logprobs)]
    finally:
        await cancel_and_wait(*prompts)
        for told in record.prompts:
            told.samples = partial(_same, told.samples())


async def _run(
    prompt: ValidPrompt,
    samples: Sequence[Choice],
    dispatcher: Dispatcher,
    outbox: Outbox[Piece | Exception],
    told: PromptRecord,
) -> Sequence[TokenLogprobs]:
    """What was told of the prompt's own tokens."""
    deliver = [one.deliver for one in samples]
    try:
        return await dispatcher.run(prompt, deliver, samples[0].note_cached, told)
    except Exception as failure:  # noqa: BLE001 (raised where the pieces are awaited)
        outbox.put(failure)
        return ()


def _raise_failure(come: Sequence[Piece | Exception]) -> None:
    for item in come:
        if isinstance(item, Exception):
            raise item


def _told(choices: Sequence[Choice]) -> tuple[SampleTold, ...]:
    return tuple(SampleTold(choice.num_tokens, choice.finish_reason) for choice in choices)


def _same(told: Sequence[SampleTold]) -> Sequence[SampleTold]:
    return told
