"""Requests for the engine's tests."""

from collections.abc import Sequence
from typing import Any

from engine.request import EngineRequest, Leg, RequestId, SampleStart, SamplingParams


def make_request(
    name: str = "r",
    prompt_len: int = 5,
    max_tokens: int = 4,
    leg: Leg = Leg.LOCAL,
    outputs: tuple[int, ...] = (),
    prompt: tuple[int, ...] | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
    ignore_eos: bool = False,
    cache_salt: str = "",
    others: Sequence[tuple[int, ...]] = (),
    **sampling: Any,
) -> EngineRequest:
    """`others`: the delivered outputs of samples 1, 2, …"""
    return EngineRequest(
        request_id=RequestId(name),
        leg=leg,
        prompt_token_ids=tuple(range(1, prompt_len + 1)) if prompt is None else prompt,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_token_ids=stop,
            ignore_eos=ignore_eos,
            **sampling,
        ),
        output_token_ids=outputs,
        cache_salt=cache_salt,
        siblings=tuple(SampleStart(index, tokens) for index, tokens in enumerate(others, 1)),
    )
