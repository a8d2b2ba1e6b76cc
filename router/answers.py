"""The shapes of our answers, one for each endpoint: for our OpenAPI document, and for whoever reads
an answer back. What is sent is made by router/responses.py and the endpoints themselves.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from router.chat_objects import ChatChoice, ChatChunkChoice
from router.responses import Completion, TextChoice, Usage


class ChatCompletion(Completion):
    object: Literal["chat.completion"]
    choices: Sequence[ChatChoice]
    usage: Usage


class TextCompletion(Completion):
    object: Literal["text_completion"]
    choices: Sequence[TextChoice]
    usage: Usage


class ChatCompletionChunk(Completion):
    object: Literal["chat.completion.chunk"]
    choices: Sequence[ChatChunkChoice]


class TextCompletionChunk(Completion):
    object: Literal["text_completion"]
    choices: Sequence[TextChoice]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baton"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: Sequence[Model]


class Status(BaseModel):
    status: str
