"""Bodies to a `ValidRequest`: every field decided, every limit checked. Raises ApiError.

Texts are tokenized on a thread, since a long prompt would hold up everybody's tokens.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from router.chat_style import ChatPrompt, ChatStyle
from router.errors import BadRequest, ModelNotFound
from router.grammar_check import GrammarCheck
from router.request import RequestId, SamplingParams, ValidPrompt, ValidRequest
from router.sampling import check_ids, for_prompt, sampling_params
from router.schemas import ChatBody, CompletionBody, RequestBody, StreamOptions
from router.structured_output import Wanted, wanted_grammar
from router.tokenizer import TextTokenizer
from router.tool_grammar import chat_grammar
from router.tool_schemas import ToolUse, tool_use

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions

TokenIds = tuple[int, ...]


class Validator:
    def __init__(
        self,
        tokenizer: TextTokenizer,
        style: ChatStyle,
        served_model_name: str,
        grammars: GrammarCheck,
        *,
        max_prompts: int,
        max_model_len: Callable[[], Awaitable[int]],
    ) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._grammars = grammars
        self.model = served_model_name
        self._max_prompts = max_prompts
        self._max_model_len = max_model_len  # asks the workers, and waits for one if need be

    async def chat(self, request_id: RequestId, body: ChatBody, session: str = "") -> ValidRequest:
        """`session`: as the request's head has it; else it is the body's `user`."""
        self._check_model(body.model)
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise BadRequest(
                "Send either 'max_tokens' or 'max_completion_tokens'.", param="max_tokens"
            )
        use = tool_use(body)
        format = self._style.check(use)
        prompt, shared = await self._style.on_thread(lambda: self._read_chat(body, use))
        asked = chat_grammar(
            wanted_grammar(body),
            use,
            format,
            self._tokenizer.token_of,
            thinks=self._style.thinks,
            is_thinking=prompt.is_thinking,
        )
        max_tokens = body.max_completion_tokens or body.max_tokens
        request = await self._request(
            request_id, body, [prompt.token_ids], shared, max_tokens, None, asked
        )
        request = replace(
            request,
            output=self._style.output(body, use, is_thinking=prompt.is_thinking),
            shown_token_ids=request.shown_token_ids | self._style.shown_token_ids(use),
        )
        return _of_session(request, session or body.user or "")

    async def completion(
        self, request_id: RequestId, body: CompletionBody, session: str = ""
    ) -> ValidRequest:
        self._check_model(body.model)
        prompts, shared = await asyncio.to_thread(self._read_completion, body)
        max_tokens, default = body.max_tokens, _COMPLETION_MAX_TOKENS
        if max_tokens == 0:
            max_tokens = 1  # of which nothing is told
        asked = wanted_grammar(body)
        request = await self._request(request_id, body, prompts, shared, max_tokens, default, asked)
        if body.max_tokens == 0:
            request = replace(request, has_output=False)
        request = _of_session(request, session or body.user or "")
        return await asyncio.to_thread(self._with_echo, request) if body.echo else request

    # One trip to a thread: each wakes it, and then the loop.
    def _read_chat(self, body: ChatBody, use: ToolUse | None) -> tuple[ChatPrompt, SamplingParams]:
        return self._style.prompt(body, use), sampling_params(body, self._tokenizer)

    def _read_completion(self, body: CompletionBody) -> tuple[list[TokenIds], SamplingParams]:
        return self._encode_prompts(body), sampling_params(body, self._tokenizer)

    def _with_echo(self, request: ValidRequest) -> ValidRequest:
        prompts = (
            replace(prompt, echo=self._tokenizer.echo(prompt.token_ids))
            for prompt in request.prompts
        )
        return replace(request, prompts=tuple(prompts))

    async def _request(
        self,
        request_id: RequestId,
        body: RequestBody,
        prompts: Sequence[TokenIds],
        shared: SamplingParams,
        max_tokens: int | None,
        default_max_tokens: int | None,
        asked: Wanted | None,
    ) -> ValidRequest:
        if asked is not None:
            shared = replace(shared, grammar=await self._grammars.text_of(asked))
        max_model_len = await self._max_model_len()
        valid = []
        for index, token_ids in enumerate(prompts):
            if body.truncate_prompt_tokens is not None:
                token_ids = token_ids[-body.truncate_prompt_tokens :]
            room = _room(token_ids, max_tokens, max_model_len)
            wanted = max_tokens or min(default_max_tokens or room, room)
            prompt_id = RequestId(f"{request_id}-{index}")
            sampling = for_prompt(shared, body.seed, wanted)
            salt = body.cache_salt or ""
            prompt = ValidPrompt(prompt_id, token_ids, sampling, salt, num_samples=body.num_samples)
            valid.append(prompt)
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        options = body.stream_options or StreamOptions()
        has_usage = options.include_usage
        return ValidRequest(
            request_id=request_id,
            prompts=tuple(valid),
            stop=stop,
            is_streaming=body.stream,
            has_usage_chunk=has_usage,
            has_continuous_usage=has_usage and options.continuous_usage_stats,
            shown_token_ids=(
                frozenset() if body.skip_special_tokens else self._tokenizer.inner_special_ids
            ),
            keeps_stop=body.include_stop_str_in_output,
            has_token_ids=body.return_token_ids,
            names_are_ids=body.return_tokens_as_token_ids,
            num_prompt_logprobs=0 if body.prompt_logprobs is None else 1 + body.prompt_logprobs,
            n=body.n,
            has_logprobs=body.num_logprobs > 0,
            priority=body.priority,
        )

    def _encode_prompts(self, body: CompletionBody) -> list[TokenIds]:
        prompts = _split(body.prompt)
        if not 1 <= len(prompts) <= self._max_prompts:
            raise BadRequest(
                f"'prompt' holds {len(prompts)} prompts; 1 to {self._max_prompts} are allowed.",
                param="prompt",
            )
        encoded = []
        for prompt in prompts:
            token_ids = self._encode(body, prompt) if isinstance(prompt, str) else tuple(prompt)
            check_ids(token_ids, self._tokenizer.vocab_size, "prompt")
            encoded.append(token_ids)
        return encoded

    def _encode(self, body: CompletionBody, prompt: str) -> TokenIds:
        is_bare = body.add_special_tokens is False
        return self._tokenizer.encode_bare(prompt) if is_bare else self._tokenizer.encode(prompt)

    def _check_model(self, name: str) -> None:
        if name != self.model:
            raise ModelNotFound(name, self.model)


def _split(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The four forms of `prompt`: a text, texts, the ids of one prompt, of several."""
    if isinstance(prompt, str):
        return [prompt]
    parts: list[str | list[int]] = []
    ids = [part for part in prompt if isinstance(part, int)]
    if ids:
        return [ids]
    parts.extend(part for part in prompt if not isinstance(part, int))
    return parts


def _room(token_ids: TokenIds, max_tokens: int | None, max_model_len: int) -> int:
    """Output tokens that fit behind the prompt; at least one, and at least `max_tokens`."""
    if not token_ids:
        raise BadRequest("The prompt has no tokens.", param="prompt")
    room = max_model_len - len(token_ids)
    wanted = max_tokens or 1
    if room < wanted:
        raise BadRequest(
            # OpenAI's words: frameworks look for them.
            f"This model's maximum context length is {max_model_len} tokens. However, the request "
            f"needs {len(token_ids) + wanted} tokens: {len(token_ids)} for the prompt and at least "
            f"{wanted} for the output.",
            code="context_length_exceeded",
        )
    return room


def _of_session(request: ValidRequest, session: str) -> ValidRequest:
    if not session:
        return request
    prompts = tuple(replace(prompt, session=session) for prompt in request.prompts)
    return replace(request, prompts=prompts)
