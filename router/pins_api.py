"""Pins in the admin API:

    GET    /admin/pins           those of this router that still stand, and what each worker keeps
    POST   /admin/pins {prompt or messages, ttl_s, name, cache_salt}
                                 the prefix stays cached where it is, or comes to be, for so long
    DELETE /admin/pins/{name}    it may go again

`prompt` is what /v1/completions takes (text or token ids), `messages` what /v1/chat/completions
does: of a conversation the prefix is all but the last tokens, which open the answer.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from router.errors import ApiError, BadRequest
from router.pins import PinBoard, PinView
from router.request import RequestId
from router.schemas import ChatBody, CompletionBody
from router.tokenizer import JSONObject
from router.validation import Validator

MAX_TTL_S = 30 * 86_400.0
_NOBODYS = RequestId("pin")

ReadPrompt = Callable[[JSONObject], Awaitable[tuple[int, ...]]]
"""Token ids of the one prompt of a request with `prompt` or `messages`. Raises ApiError."""


class PrefixReader:
    """A `ReadPrompt`."""

    def __init__(self, validator: Validator) -> None:
        self._validator = validator

    async def __call__(self, body: JSONObject) -> tuple[int, ...]:
        asked = {"model": self._validator.model, "max_tokens": 1, **body}
        if "messages" in body:
            request = await self._validator.chat(_NOBODYS, ChatBody.parse(asked))
        else:
            request = await self._validator.completion(_NOBODYS, CompletionBody.parse(asked))
        return request.prompts[0].token_ids


class PinBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt: str | list[int] | None = None
    messages: list[dict[str, object]] | None = None
    ttl_s: float = Field(3600.0, gt=0, le=MAX_TTL_S, allow_inf_nan=False)
    name: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9_.-]*$")] = ""
    cache_salt: Annotated[str, Field(max_length=256)] = ""


class Pinned(BaseModel):
    pins: list[PinView]


class Unpinned(BaseModel):
    name: str


def add_pins(app: FastAPI, board: PinBoard, read_prompt: ReadPrompt) -> None:
    @app.get("/admin/pins")
    async def listed() -> Pinned:
        return Pinned(pins=board.all())

    @app.post("/admin/pins")
    async def pin(body: PinBody) -> PinView:
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("Send either 'prompt' or 'messages'.", param="prompt")
        asked: JSONObject = {"prompt": body.prompt}
        if body.messages is not None:
            asked = {"messages": body.messages}
        token_ids = await read_prompt(asked)
        return await board.pin(token_ids, body.cache_salt, body.ttl_s, body.name)

    @app.delete("/admin/pins/{name}")
    async def unpin(name: str) -> Unpinned:
        if not await board.unpin(name):
            raise ApiError(HTTPStatus.NOT_FOUND, f"There is no pin {name!r}.", param="name")
        return Unpinned(name=name)
