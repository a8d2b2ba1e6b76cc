"""From a body to how tokens are chosen: every field decided, every id in the vocabulary.

Raises BadRequest, naming the parameter. Bounds that need no tokenizer are router/schemas.py's.
"""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace

from router.errors import BadRequest
from router.request import SamplingParams
from router.schemas import RequestBody
from router.tokenizer import TextTokenizer

_UNDECIDED = 0  # depends on the prompt


def sampling_params(body: RequestBody, tokenizer: TextTokenizer) -> SamplingParams:
    """What all prompts of a request share; `for_prompt` decides the rest."""
    size = tokenizer.vocab_size
    bias = {int(token_id): value for token_id, value in body.logit_bias.items()}
    allowed = body.allowed_token_ids or []
    num_ranked = 1 if body.num_samples > body.n else 0  # logprobs say which samples are best
    check_ids(bias, size, "logit_bias")
    check_ids(allowed, size, "allowed_token_ids")
    check_ids(body.stop_token_ids, size, "stop_token_ids")
    return SamplingParams(
        max_tokens=_UNDECIDED,
        temperature=body.temperature,
        top_k=max(0, body.top_k),  # -1 is "off" too, as in vLLM
        top_p=body.top_p,
        min_p=body.min_p,
        seed=_UNDECIDED,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(bias.items()),
        min_tokens=body.min_tokens,
        allowed_token_ids=tuple(dict.fromkeys(allowed)),
        num_logprobs=max(body.num_logprobs, num_ranked),
        num_prompt_logprobs=body.num_prompt_logprobs,
        bad_words=tuple(dict.fromkeys(_bad_words(body.bad_words, tokenizer))),
    )


def for_prompt(params: SamplingParams, seed: int | None, max_tokens: int) -> SamplingParams:
    """A seed is drawn where the client gave none, for each prompt its own."""
    if params.min_tokens > max_tokens:
        raise BadRequest(
            f"'min_tokens' is {params.min_tokens}; it must be at most 'max_tokens', "
            f"which is {max_tokens}.",
            param="min_tokens",
        )
    seed = secrets.randbits(64) if seed is None else seed % (1 << 64)
    return replace(params, max_tokens=max_tokens, seed=seed)


def check_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    if (highest := max(token_ids, default=0)) >= vocab_size:
        raise BadRequest(
            f"Token id {highest} is not in the vocabulary of {vocab_size} tokens.", param=param
        )


def _bad_words(words: Iterable[str], tokenizer: TextTokenizer) -> Iterator[tuple[int, ...]]:
    """As vLLM takes them: each word as it stands at the beginning of a text, and as it stands
    behind a space. (vLLM leaves the second out where it has another number of tokens.)"""
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, f" {bare}"):
            token_ids = tokenizer.encode_bare(text)
            if not token_ids:
                raise BadRequest(f"The word {word!r} has no tokens.", param="bad_words")
            yield token_ids
