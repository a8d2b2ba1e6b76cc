"""Sends the pieces of an answer: collected into one document, or as server-sent events.

Nothing is sent before the first piece is there, so that a request which fails until then is
answered with a proper status.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from router.choice import Piece, PieceToken
from router.exchange import Reply
from router.request import ValidRequest
from router.responses import Format, PromptTokensDetails, Usage, WholeChoice


async def answer(
    request: ValidRequest, pieces: AsyncGenerator[Piece, None], form: Format, reply: Reply
) -> None:
    async with aclosing(pieces):
        if request.is_streaming:
            await _stream(request, pieces, form, reply)
        else:
            await _collect(request, pieces, form, reply)


async def _collect(
    request: ValidRequest, pieces: AsyncGenerator[Piece, None], form: Format, reply: Reply
) -> None:
    texts = ["" for _ in request.prompts]
    tokens: list[tuple[PieceToken, ...]] = [() for _ in request.prompts]
    last: dict[int, Piece] = {}
    async for piece in pieces:
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.tokens
        last[piece.index] = piece
    choices = []
    for index, text in enumerate(texts):
        reason = last[index].finish_reason
        assert reason is not None, last[index]
        told = tokens[index] if request.has_logprobs else None
        choices.append(WholeChoice(index, text, told, reason))
    reply.json(form.completion(choices, _usage(request, last)))


async def _stream(
    request: ValidRequest, pieces: AsyncGenerator[Piece, None], form: Format, reply: Reply
) -> None:
    has_usage = request.has_usage_chunk
    last: dict[int, Piece] = {}
    async for piece in pieces:
        opening = form.opening(piece.index) if piece.index not in last else []
        last[piece.index] = piece
        for choice in [*opening, *form.delta(piece)]:
            await reply.event(form.chunk([choice], has_usage=has_usage))
    if has_usage:
        await reply.event(form.chunk([], _usage(request, last), has_usage=True))
    reply.last_event("[DONE]")


def _usage(request: ValidRequest, last: dict[int, Piece]) -> Usage:
    num_prompt = request.num_prompt_tokens
    num_output = sum(piece.num_tokens for piece in last.values())
    num_cached = sum(piece.num_cached_tokens for piece in last.values())
    return Usage(
        prompt_tokens=num_prompt,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
    )
