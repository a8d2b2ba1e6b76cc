"""Request bodies, as OpenAI names their fields; strict, and honest about what is not there.

A parameter that Baton does not know is refused by name. One that OpenAI has and Baton does not
support is refused too, unless its value asks for nothing (an empty `tools`, a null): many
clients always send those.
"""

from abc import ABC, abstractmethod
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from router.errors import BadRequest
from router.message_schemas import ChatMessage, check_messages
from router.structured_output import StructuredOutputFields
from router.tokenizer import JSONObject
from router.tool_schemas import ToolFields
from router.unsupported import asked_for

BodyT = TypeVar("BodyT", bound=BaseModel)

TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
StopStrings = Annotated[list[StopString], Field(max_length=16)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Count = Annotated[int, Field(ge=1, le=16)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: in every chunk
    include_obfuscation: Literal[False] = False


class RequestBody(StructuredOutputFields, _Strict, ABC):
    """What both kinds of completion have."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Count = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[TokenIdText, Bias], Field(max_length=1024)] = {}
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: StopString | StopStrings | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # For the operator's own use; Baton keeps nothing of them.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Beyond OpenAI's, as vLLM names them.
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=128)] = []
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = []
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    @abstractmethod
    def num_logprobs(self) -> int:
        """As `SamplingParams` has it. Raises BadRequest."""

    @property
    def num_samples(self) -> int:
        """Of each prompt; `n` of them are answers. Raises BadRequest."""
        return self.n

    @property
    def num_prompt_logprobs(self) -> int:
        return 0 if self.prompt_logprobs is None else 1 + self.prompt_logprobs

    @classmethod
    def parse(cls, body: JSONObject) -> Self:
        """Raises BadRequest, naming the parameter."""
        request = parsed(cls, asked_for(cls, body))
        if request.stream_options is not None and not request.stream:
            raise BadRequest(
                "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
            )
        if request.prompt_logprobs is not None and request.stream:
            raise BadRequest(
                "'prompt_logprobs' is not available when 'stream' is true.", param="prompt_logprobs"
            )
        return request


class ChatBody(ToolFields, RequestBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    # Beyond OpenAI's, as vLLM names them.
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = {}
    include_reasoning: bool = True

    @classmethod
    def parse(cls, body: JSONObject) -> Self:
        request = super().parse(body)
        check_messages(request.messages)
        if request.continue_final_message and body.get("add_generation_prompt"):
            raise BadRequest(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                param="continue_final_message",
            )
        return request

    @property
    def num_logprobs(self) -> int:
        if self.top_logprobs and not self.logprobs:
            raise BadRequest(
                "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
            )
        return 1 + self.top_logprobs if self.logprobs else 0


class CompletionBody(RequestBody):
    """POST /v1/completions"""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    best_of: Count | None = None

    @classmethod
    def parse(cls, body: JSONObject) -> Self:
        request = super().parse(body)
        tells_prompt = request.echo or request.prompt_logprobs is not None
        if request.max_tokens == 0 and (request.stream or not tells_prompt):
            raise BadRequest(
                "'max_tokens' may be 0 with 'echo' or 'prompt_logprobs' only, and not streamed.",
                param="max_tokens",
            )
        return request

    @property
    def num_samples(self) -> int:
        best_of = self.best_of or self.n
        if best_of < self.n:
            raise BadRequest(
                f"'best_of' is {best_of}; it must be at least 'n', which is {self.n}.",
                param="best_of",
            )
        if best_of > self.n and self.stream:
            raise BadRequest(
                "'best_of' must be equal to 'n' when 'stream' is true: which answers are the best "
                "is known at their ends.",
                param="best_of",
            )
        return best_of

    @property
    def num_logprobs(self) -> int:
        return 0 if self.logprobs is None else 1 + self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        if self.echo and self.stream and self.num_logprobs:
            raise BadRequest(
                "'echo' is not available when 'stream' is true and 'logprobs' are wanted: those of "
                "the prompt are known at the end.",
                param="echo",
            )
        return max(super().num_prompt_logprobs, self.num_logprobs if self.echo else 0)


def parsed(model: type[BodyT], body: JSONObject) -> BodyT:
    """Raises BadRequest, naming the parameter."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _bad_request(error, body) from error


def _bad_request(error: ValidationError, body: JSONObject) -> BadRequest:
    """The first thing that is wrong, by name."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = _param(first["loc"], body)
    if first["type"] == "extra_forbidden":
        return BadRequest(
            f"Unrecognized request argument supplied: {param}",
            param=param,
            code="unknown_parameter",
        )
    if first["type"] == "missing":
        param = ".".join(filter(None, [param, str(first["loc"][-1])]))
        return BadRequest(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    return BadRequest(f"Invalid value for '{param}': {first['msg']}.", param=param)


def _param(location: tuple[int | str, ...], body: JSONObject) -> str:
    """What of the body is at that place: members of unions, which no client knows, left out."""
    path = []
    value: object = body
    for part in location:
        match value:
            case dict() if part in value:
                value = value[part]
            case list() if isinstance(part, int):
                value = value[part]
            case _:
                continue
        path.append(str(part))
    return ".".join(path)
