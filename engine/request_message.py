"""Reads an `EngineRequest` off a control-plane message, by its shape alone.

The engine does not know the control plane; the two requests of protos/serving.proto have the
attributes below, and both services turn them into engine requests here, so that one place checks
what a peer may ask of an engine.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.errors import InvalidRequest
from engine.request import (
    MAX_SAMPLES,
    MAX_TOP_LOGPROBS,
    EngineRequest,
    Leg,
    RequestId,
    SampleStart,
    SamplingParams,
    TokenLogprobs,
)


class LogitBiasMessage(Protocol):
    """serving.proto: LogitBias."""

    token_id: int
    bias: float


class TokenSequenceMessage(Protocol):
    """serving.proto: TokenSequence."""

    @property
    def token_ids(self) -> Iterable[int]: ...


class SamplingMessage(Protocol):
    """serving.proto: Sampling."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    ignore_eos: bool
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_tokens: int
    num_logprobs: int
    num_prompt_logprobs: int
    grammar: str

    @property
    def stop_token_ids(self) -> Iterable[int]: ...

    @property
    def logit_bias(self) -> Iterable["LogitBiasMessage"]: ...

    @property
    def allowed_token_ids(self) -> Iterable[int]: ...

    @property
    def bad_words(self) -> Iterable["TokenSequenceMessage"]: ...


class LogprobsMessage(Protocol):
    """serving.proto: TokenLogprobs."""

    logprob: float
    rank: int

    @property
    def top_token_ids(self) -> Iterable[int]: ...

    @property
    def top_logprobs(self) -> Iterable[float]: ...


class SampleMessage(Protocol):
    """serving.proto: Sample."""

    is_finished: bool

    @property
    def output_token_ids(self) -> Iterable[int]: ...


class RequestMessage(Protocol):
    """serving.proto: what GenerateRequest and PrefillRequest have in common."""

    request_id: str
    cache_salt: str

    @property
    def prompt_token_ids(self) -> Iterable[int]: ...

    @property
    def sampling(self) -> SamplingMessage: ...

    @property
    def samples(self) -> Sequence[SampleMessage]: ...


def token_logprobs(message: LogprobsMessage) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=message.logprob,
        rank=message.rank,
        top_token_ids=tuple(message.top_token_ids),
        top_logprobs=tuple(message.top_logprobs),
    )


def engine_request(
    message: RequestMessage, leg: Leg, request_id: RequestId, vocab_size: int
) -> EngineRequest:
    """Checks a message and turns it into a request of this engine, under `request_id`.

    Raises InvalidRequest with a text that a user can read.
    """
    prompt = tuple(message.prompt_token_ids)
    sampling = _sampling_params(message.sampling, vocab_size)
    if not prompt:
        raise InvalidRequest("the prompt has no tokens")
    _check_ids(prompt, vocab_size)
    first, *others = _samples(message, leg, sampling, vocab_size)
    return EngineRequest(
        request_id=request_id,
        leg=leg,
        prompt_token_ids=prompt,
        sampling=sampling,
        output_token_ids=first.output_token_ids,
        sample=first.sample,
        cache_salt=message.cache_salt,
        siblings=tuple(others),
    )


def _samples(
    message: RequestMessage, leg: Leg, sampling: SamplingParams, vocab_size: int
) -> list[SampleStart]:
    """Those to be run, at least one. Where outputs were delivered a prefill leg samples nothing:
    one of those stands for all."""
    if len(message.samples) > MAX_SAMPLES:
        raise InvalidRequest(f"{len(message.samples)} samples; at most {MAX_SAMPLES} are served")
    starts = [
        SampleStart(index, _check_ids(sample.output_token_ids, vocab_size))
        for index, sample in enumerate(message.samples)
        if not sample.is_finished
    ]
    if not starts:
        raise InvalidRequest("there is no sample to run")
    resumed = [start for start in starts if start.output_token_ids]
    longest = max(len(start.output_token_ids) for start in starts)
    if longest >= sampling.max_tokens:
        raise InvalidRequest(f"{longest} of max_tokens {sampling.max_tokens} are delivered")
    return resumed[:1] if resumed and leg is Leg.PREFILL else starts


def _sampling_params(message: SamplingMessage, vocab_size: int) -> SamplingParams:
    """The messages' ids are unsigned; everything else is checked here."""
    if message.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1")
    _check_range("temperature", message.temperature, 0, math.inf)
    if not 0 < message.top_p <= 1:
        raise InvalidRequest(f"top_p is {message.top_p}; it must be above 0 and at most 1")
    _check_range("min_p", message.min_p, 0, 1)
    _check_range("presence_penalty", message.presence_penalty, -2, 2)
    _check_range("frequency_penalty", message.frequency_penalty, -2, 2)
    # Beyond these bounds logits overflow, or all become equal.
    _check_range("repetition_penalty", message.repetition_penalty, 0.01, 100)
    if message.min_tokens > message.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {message.min_tokens}; max_tokens is only {message.max_tokens}"
        )
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        stop_token_ids=frozenset(_check_ids(message.stop_token_ids, vocab_size)),
        ignore_eos=message.ignore_eos,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=_logit_bias(message.logit_bias, vocab_size),
        min_tokens=message.min_tokens,
        allowed_token_ids=_check_ids(message.allowed_token_ids, vocab_size),
        bad_words=_bad_words(message.bad_words, vocab_size),
        num_logprobs=_num_logprobs(message.num_logprobs),
        num_prompt_logprobs=_num_logprobs(message.num_prompt_logprobs),
        grammar=message.grammar,
    )


def _num_logprobs(count: int) -> int:
    if count > 1 + MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"logprobs of the {count - 1} likeliest tokens; at most {MAX_TOP_LOGPROBS} are told"
        )
    return count


def _logit_bias(
    message: Iterable[LogitBiasMessage], vocab_size: int
) -> tuple[tuple[int, float], ...]:
    bias = {entry.token_id: entry.bias for entry in message}
    _check_ids(bias, vocab_size)
    for value in bias.values():
        _check_range("logit_bias", value, -100, 100)
    return tuple(bias.items())


def _bad_words(
    message: Iterable[TokenSequenceMessage], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    words = tuple(_check_ids(word.token_ids, vocab_size) for word in message)
    if not all(words):
        raise InvalidRequest("bad_words holds a word without tokens")
    return words


def _check_ids(token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    checked = tuple(token_ids)
    highest = max(checked, default=0)
    if highest >= vocab_size:
        raise InvalidRequest(f"token id {highest} is not in the vocabulary of {vocab_size}")
    return checked


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        bounds = f"{least} or more" if most == math.inf else f"between {least} and {most}"
        raise InvalidRequest(f"{name} is {value}; it must be {bounds}")
