"""Text to tokens and back, as vLLM has it: `POST /tokenize` and `/detokenize`.

What a chat's messages become is what `/v1/chat/completions` would compute.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from router.chat_objects import is_none
from router.chat_style import ChatStyle
from router.errors import BadRequest, ModelNotFound
from router.exchange import Reply
from router.message_schemas import ChatMessage
from router.record import RequestRecord
from router.sampling import check_ids
from router.schemas import ChatBody, TokenId, parsed
from router.tokenizer import JSONObject, TextTokenizer
from router.tool_schemas import MAX_TOOLS, Tool, tool_use

_OF_CHATS = (
    "messages", "tools", "add_special_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs",
)  # fmt: skip


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None

    @classmethod
    def parse(cls, body: JSONObject) -> Self:
        """Raises BadRequest, naming the parameter."""
        return parsed(cls, {name: value for name, value in body.items() if value is not None})


class TokenizeBody(_Body):
    """POST /tokenize, of a text or of a chat."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = {}


class DetokenizeBody(_Body):
    """POST /detokenize"""

    tokens: list[TokenId]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: Sequence[str] | None = Field(default=None, exclude_if=is_none)


class Detokenized(BaseModel):
    prompt: str


class TokenApi:
    def __init__(
        self,
        tokenizer: TextTokenizer,
        style: ChatStyle,
        served_model_name: str,
        max_model_len: Callable[[], Awaitable[int]],
    ) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._served_model_name = served_model_name
        self._max_model_len = max_model_len  # asks the workers, and waits for one if need be

    async def tokenize(self, record: RequestRecord, body: JSONObject, reply: Reply) -> None:
        """Raises ApiError."""
        asked = TokenizeBody.parse(body)
        self._check_model(asked)
        if (asked.prompt is None) == (asked.messages is None):
            raise BadRequest("Send either 'prompt' or 'messages'.", param="prompt")
        if asked.prompt is not None:
            token_ids = await asyncio.to_thread(self._encode, asked.prompt, asked)
        else:
            token_ids = await self._style.on_thread(lambda: self._encode_chat(body))
        told = Tokenized(
            count=len(token_ids),
            max_model_len=await self._max_model_len(),
            tokens=token_ids,
            token_strs=(
                [self._tokenizer.token_name(token_id) for token_id in token_ids]
                if asked.return_token_strs
                else None
            ),
        )
        reply.json(told.model_dump_json())

    async def detokenize(self, record: RequestRecord, body: JSONObject, reply: Reply) -> None:
        """Special tokens are part of the text. Raises ApiError."""
        asked = DetokenizeBody.parse(body)
        self._check_model(asked)
        check_ids(asked.tokens, self._tokenizer.vocab_size, "tokens")
        text = await asyncio.to_thread(self._tokenizer.decode_all, asked.tokens)
        reply.json(Detokenized(prompt=text).model_dump_json())

    def _encode(self, prompt: str, asked: TokenizeBody) -> Sequence[int]:
        is_bare = asked.add_special_tokens is False
        encode = self._tokenizer.encode_bare if is_bare else self._tokenizer.encode
        return encode(prompt)

    def _encode_chat(self, body: JSONObject) -> Sequence[int]:
        of_chat = {name: body[name] for name in _OF_CHATS if name in body}
        chat = ChatBody.parse({"model": self._served_model_name, **of_chat})
        use = tool_use(chat)
        self._style.check(use)
        return self._style.prompt(chat, use).token_ids

    def _check_model(self, asked: _Body) -> None:
        if asked.model not in (None, self._served_model_name):
            raise ModelNotFound(asked.model or "", self._served_model_name)
