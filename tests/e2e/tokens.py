"""Asks workers for tokens as the router does, without text: the router's own dispatch."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.request import FinishReason, RequestId, SamplingParams, TokenLogprobs, ValidPrompt
from router.sample import Deliver
from router.workers import WorkerSet
from tests.e2e.cluster import MODEL_NAME, WorkerProcess


@dataclass
class Told:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class TokenClient:
    """Prompts in, output tokens out."""

    def __init__(self, dispatcher: Dispatcher, registry: CollectorRegistry) -> None:
        self._dispatcher = dispatcher
        self._registry = registry
        self._serial = count()

    async def told(self, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Told:
        """The output tokens and what was told beside them."""
        cache_salt = sampling.pop("cache_salt", "")
        off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "stop_token_ids": ()}
        params = SamplingParams(**{**off, "max_tokens": max_tokens, "ignore_eos": True, **sampling})
        told = Told()

        def deliver(
            token_ids: Sequence[int], reason: FinishReason | None, logprobs: Sequence[TokenLogprobs]
        ) -> bool:
            told.token_ids += token_ids
            told.logprobs += logprobs
            return True

        request_id = RequestId(f"test-{next(self._serial)}")
        valid = ValidPrompt(request_id, tuple(prompt), params, cache_salt)
        told.prompt_logprobs += await self._dispatcher.run(valid, [deliver])
        return told

    async def samples(
        self, prompt: Sequence[int], max_tokens: int, n: int, **sampling: Any
    ) -> list[list[int]]:
        """The tokens of each of n samples of one request."""
        cache_salt = sampling.pop("cache_salt", "")
        off = {"top_k": 0, "top_p": 1.0, "stop_token_ids": (), "ignore_eos": True}
        params = SamplingParams(**{**off, "max_tokens": max_tokens, **sampling})
        token_ids: list[list[int]] = [[] for _ in range(n)]

        def taken_by(sample: list[int]) -> Deliver:
            def deliver(
                new: Sequence[int], reason: FinishReason | None, told: Sequence[TokenLogprobs]
            ) -> bool:
                sample.extend(new)
                return True

            return deliver

        request_id = RequestId(f"test-{next(self._serial)}")
        valid = ValidPrompt(request_id, tuple(prompt), params, cache_salt, num_samples=n)
        await self._dispatcher.run(valid, [taken_by(sample) for sample in token_ids])
        return token_ids

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        ignore_eos: bool = True,
        cache_salt: str = "",
    ) -> list[int]:
        told = await self.told(
            prompt,
            max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            ignore_eos=ignore_eos,
            cache_salt=cache_salt,
        )
        return told.token_ids

    def retries(self, leg: str) -> float:
        """Legs of that kind that failed so far."""
        return sum(
            sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if sample.name == "baton_retries_total" and sample.labels["leg"] == leg
        )


@asynccontextmanager
async def token_client(
    prefills: Sequence[WorkerProcess],
    decodes: Sequence[WorkerProcess],
    *,
    mode: Literal["disaggregated", "colocated"] = "disaggregated",
    inactivity_s: float = 10.0,
) -> AsyncIterator[TokenClient]:
    config = RouterConfig(
        model_path="",
        served_model_name=MODEL_NAME,
        mode=mode,
        inactivity_s=inactivity_s,
        prefill_at="remote",
    )
    registry = CollectorRegistry()
    workers = WorkerSet(
        [worker.grpc_address for worker in decodes],
        [worker.grpc_address for worker in prefills],
        interval_s=0.1,
        timeout_s=config.status_timeout_s,  # a machine that is busy is not a worker that is frozen
    )
    workers.start()
    try:
        dispatcher = Dispatcher(workers, config, RouterMetrics(registry, workers))
        # One that is not known yet would be passed over, whatever a test says of who does what.
        ready = await workers.wait_for(
            lambda: all(worker.is_ready for worker in workers.everyone) or None, 10.0
        )
        assert ready, [worker.problem for worker in workers.everyone]
        yield TokenClient(dispatcher, registry)
    finally:
        await workers.close()
