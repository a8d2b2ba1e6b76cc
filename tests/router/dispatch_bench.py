"""A dispatcher over fake workers, without HTTP or text; and the check that nothing is left."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.request import FinishReason, RequestId, SamplingParams, TokenLogprobs, ValidPrompt
from router.workers import WorkerSet
from tests.router.configs import config_for, tasks_of_router
from tests.router.fake_workers import FakeCluster, fake_cluster, until

ANSWER = (11, 12, 13, 14)


def make_prompt(max_tokens: int = 50) -> ValidPrompt:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        seed=1 << 63,
        stop_token_ids=(9,),
        ignore_eos=True,
        min_p=0.125,
        presence_penalty=-1.5,
        frequency_penalty=1.25,
        repetition_penalty=1.5,
        logit_bias=((5, -100.0), (6, 0.5)),
        min_tokens=1,
        allowed_token_ids=(5, 11),
        bad_words=((1, 2), (3,)),
    )
    return ValidPrompt(RequestId("r-0"), (1, 2, 3), sampling)


@dataclass
class Client:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    wanted: int = 1000

    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        logprobs: Sequence[TokenLogprobs],
    ) -> bool:
        self.logprobs += logprobs
        self.token_ids += token_ids
        self.finish_reason = finish_reason
        return len(self.token_ids) < self.wanted


@dataclass
class Bench:
    """A dispatcher over a fake cluster."""

    cluster: FakeCluster
    dispatcher: Dispatcher
    workers: WorkerSet
    registry: CollectorRegistry

    async def run(self, prompt: ValidPrompt | None = None, wanted: int = 1000) -> Client:
        client = Client(wanted=wanted)
        await self.dispatcher.run(prompt or make_prompt(), [client.take])
        return client

    def retries(self, leg: str, reason: str) -> float:
        labels = {"leg": leg, "reason": reason}
        return self.registry.get_sample_value("baton_retries_total", labels) or 0.0


StartBench = Callable[..., AbstractAsyncContextManager[Bench]]


@asynccontextmanager
async def bench_over_fakes(
    num_prefills: int = 1, num_decodes: int = 1, **changes: object
) -> AsyncIterator[Bench]:
    async with fake_cluster(ANSWER, num_prefills=num_prefills, num_decodes=num_decodes) as cluster:
        config = config_for(cluster, **changes)
        registry = CollectorRegistry()
        workers = WorkerSet(config.decode, config.prefill, interval_s=0.05, timeout_s=0.5)
        dispatcher = Dispatcher(workers, config, RouterMetrics(registry, workers))
        workers.start()
        everyone = [*workers.decodes, *workers.prefills]
        await until(lambda: all(worker.is_ready for worker in everyone))
        yield Bench(cluster, dispatcher, workers, registry)
        await until(lambda: cluster.relay.num_open_calls == 0)
        assert [worker.load for worker in everyone] == [0] * len(everyone)
        await workers.close()
        assert not tasks_of_router()


@asynccontextmanager
async def until_tokens(bench: Bench, client: Client, count: int) -> AsyncIterator[None]:
    """Runs a prompt; the body is run when that many tokens are there."""
    running = asyncio.create_task(bench.dispatcher.run(make_prompt(), [client.take]))
    await until(lambda: len(client.token_ids) >= count)
    yield
    await running
