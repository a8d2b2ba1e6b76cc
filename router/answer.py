"""Sends the pieces of an answer: collected into one document, or as server-sent events.

Nothing is sent before the first piece is there, so that a request which fails until then is
answered with a proper status.
"""

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from router.best_of import Sample, best_of
from router.choice import Piece, PromptTold
from router.chunks import Chunks
from router.exchange import Reply
from router.prompt_answer import with_prompt
from router.request import FinishReason, ValidRequest
from router.responses import Format, PromptTokensDetails, Usage, WholeChoice

Pieces = AsyncGenerator[Sequence[Piece | PromptTold], None]


async def answer(request: ValidRequest, pieces: Pieces, form: Format, reply: Reply) -> None:
    async with aclosing(pieces):
        if request.is_streaming:
            await _stream(request, pieces, form, reply)
        else:
            await _collect(request, pieces, form, reply)


async def _collect(request: ValidRequest, pieces: Pieces, form: Format, reply: Reply) -> None:
    samples: dict[int, Sample] = {}
    told: dict[int, PromptTold] = {}
    async for come in pieces:
        for piece in come:
            if isinstance(piece, PromptTold):
                told[piece.index] = piece
            else:
                samples.setdefault(piece.index, Sample()).add(piece)
    choices: list[WholeChoice] = []
    ordered = (samples[index] for index in sorted(samples))
    for index, prompt in enumerate(request.prompts):
        of_prompt = list(itertools.islice(ordered, prompt.num_samples))
        for sample in best_of(of_prompt, request.n):
            whole = _whole(request, len(choices), sample)
            choices.append(with_prompt(whole, prompt, request.num_prompt_logprobs, told.get(index)))
    last = {index: sample.last for index, sample in samples.items()}
    reply.json(form.completion(choices, _usage(request, last)))


def _whole(request: ValidRequest, index: int, sample: Sample) -> WholeChoice:
    tokens = sample.tokens if request.has_logprobs else None
    if not request.has_output:
        return WholeChoice(index, "", tokens and (), FinishReason.LENGTH)
    token_ids = tuple(token.token_id for token in sample.tokens)
    return WholeChoice(index, sample.text, tokens, sample.finish_reason, token_ids=token_ids)


async def _stream(request: ValidRequest, pieces: Pieces, form: Format, reply: Reply) -> None:
    has_usage = request.has_usage_chunk
    chunks = Chunks(form, has_usage=has_usage)
    last: dict[int, Piece] = {}
    async for come in pieces:
        told = [piece for piece in come if isinstance(piece, Piece)]
        assert len(told) == len(come), "refused: what is told of prompts is never streamed"
        last |= {piece.index: piece for piece in told}
        so_far = _usage(request, last) if request.has_continuous_usage else None
        await reply.events(chunks.of(told, so_far))
    if has_usage:
        await reply.events(chunks.usage(_usage(request, last)))
    reply.last_event("[DONE]")


def _usage(request: ValidRequest, last: dict[int, Piece]) -> Usage:
    num_prompt = request.num_prompt_tokens
    num_output = sum(piece.num_tokens for piece in last.values()) if request.has_output else 0
    num_cached = sum(piece.num_cached_tokens for piece in last.values())
    return Usage(
        prompt_tokens=num_prompt,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
    )
