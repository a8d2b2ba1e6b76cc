"""The shapes of our answers, one for each endpoint: for our OpenAPI document, and for whoever reads
an answer back. What is sent is made by router/responses.py and the endpoints themselves.
"""

import importlib.metadata
from collections.abc import Sequence
from typing import Literal, Self

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


class Version(BaseModel):
    version: str

    @classmethod
    def of_package(cls) -> Self:
        try:
            return cls(version=importlib.metadata.version("baton-serving"))
        except importlib.metadata.PackageNotFoundError:
            return cls(version="unknown")  # run from a clone that is not installed


class Status(BaseModel):
    status: str
