"""Reads an `EngineRequest` off a control-plane message, by its shape alone.

The engine does not know the control plane; the two requests of protos/serving.proto have the
attributes below, and both services turn them into engine requests here, so that one place checks
what a peer may ask of an engine.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.errors import InvalidRequest
from engine.request import EngineRequest, Leg, RequestId, SamplingParams


class SamplingMessage(Protocol):
    """serving.proto: Sampling."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    ignore_eos: bool

    @property
    def stop_token_ids(self) -> Iterable[int]: ...


class SampleMessage(Protocol):
    """serving.proto: Sample."""

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


def engine_request(
    message: RequestMessage, leg: Leg, request_id: RequestId, vocab_size: int
) -> EngineRequest:
    """Checks a message and turns it into a request of this engine, under `request_id`.

    Raises InvalidRequest with a text that a user can read.
    """
    if len(message.samples) != 1:
        raise InvalidRequest(f"{len(message.samples)} samples; one is supported")
    prompt = tuple(message.prompt_token_ids)
    outputs = tuple(message.samples[0].output_token_ids)
    sampling = _sampling_params(message.sampling)
    if not prompt:
        raise InvalidRequest("the prompt has no tokens")
    highest = max(max(prompt), max(outputs, default=0))
    if highest >= vocab_size:
        raise InvalidRequest(f"token id {highest} is not in the vocabulary of {vocab_size}")
    if len(outputs) >= sampling.max_tokens:
        raise InvalidRequest(f"{len(outputs)} of max_tokens {sampling.max_tokens} are delivered")
    return EngineRequest(
        request_id=request_id,
        leg=leg,
        prompt_token_ids=prompt,
        sampling=sampling,
        output_token_ids=outputs,
        cache_salt=message.cache_salt,
    )


def _sampling_params(message: SamplingMessage) -> SamplingParams:
    if not (math.isfinite(message.temperature) and message.temperature >= 0):
        raise InvalidRequest(f"temperature is {message.temperature}; it must be 0 or more")
    if not 0 < message.top_p <= 1:
        raise InvalidRequest(f"top_p is {message.top_p}; it must be above 0 and at most 1")
    if message.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1")
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )
