"""What an answer tells of its prompt: `echo` puts it before the text, and its logprobs before the
answer's; `prompt_logprobs` (vLLM's) tells them beside it.
"""

from dataclasses import replace

from router.choice import PieceToken, PromptTold
from router.request import Echo, TokenLogprobs, ValidPrompt
from router.responses import WholeChoice


def with_prompt(
    whole: WholeChoice, prompt: ValidPrompt, num_prompt_logprobs: int, told: PromptTold | None
) -> WholeChoice:
    """`told`: None if nobody asked for the prompt's logprobs."""
    if prompt.echo is not None:
        whole = _with_echo(whole, prompt.echo, prompt.token_ids, told, prompt.sampling.num_logprobs)
    if num_prompt_logprobs:
        assert told is not None, prompt
        entries = (_cut(entry, num_prompt_logprobs) for entry in told.logprobs)
        prompt_tokens = tuple(zip(prompt.token_ids, (None, *entries), strict=True))
        whole = replace(whole, prompt_tokens=prompt_tokens)
    return whole


def _with_echo(
    whole: WholeChoice,
    echo: Echo,
    token_ids: tuple[int, ...],
    told: PromptTold | None,
    num_logprobs: int,
) -> WholeChoice:
    tokens = whole.tokens
    if tokens is not None:
        assert told is not None, whole
        entries = (None, *(_cut(entry, num_logprobs) for entry in told.logprobs))
        moved = (token._replace(text_offset=token.text_offset + len(echo.text)) for token in tokens)
        tokens = (*map(PieceToken, token_ids, echo.offsets, entries), *moved)
    return replace(whole, text=echo.text + whole.text, tokens=tokens)


def _cut(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    """`count` as `SamplingParams.num_logprobs`."""
    return entry._replace(top=entry.top[: count - 1])
