"""Both worker services in one process, around real engines and fabrics (`inproc://`), without
gRPC: a leg writes its events into a list. What needs two processes is in tests/e2e.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from decode_server.leg import DecodeLeg
from decode_server.metrics import DecodeMetrics
from decode_server.tail import TailPolicy
from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.request import EngineRequest, Leg, RequestId, SampleStart, SamplingParams
from kvfabric.config import FabricConfig
from kvfabric.fabric import Fabric
from kvfabric.ticket import KVShard, Ticket, TransferId
from prefill_server.leg import PrefillLeg
from prefill_server.metrics import PrefillMetrics
from protos import serving_pb2 as pb
from runtime.grammar import Vocabulary
from runtime.metrics import HandoffStages

WAIT_S = 20.0


@dataclass
class Worker:
    """An engine and a fabric, as a worker process has them."""

    engine: Engine
    fabric: Fabric
    loop_side: AsyncEngine
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _serial: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        stages = HandoffStages(self.registry)
        self._prefill_metrics = PrefillMetrics(self.registry, stages)
        self._decode_metrics = DecodeMetrics(self.registry, stages)
        self.tails = TailPolicy(self.engine.config.max_local_tail)

    def request(
        self,
        leg: Leg,
        prompt: Sequence[int],
        max_tokens: int,
        outputs: Sequence[int] = (),
        cache_salt: str = "",
        others: Sequence[Sequence[int]] = (),
        sample: int = 0,
        **sampling_changes: Any,
    ) -> EngineRequest:
        sampling = SamplingParams(
            **{"max_tokens": max_tokens, "ignore_eos": True, **sampling_changes}
        )
        request_id = RequestId(f"request-{next(self._serial)}")
        return EngineRequest(
            request_id,
            leg,
            tuple(prompt),
            sampling,
            tuple(outputs),
            sample,
            cache_salt=cache_salt,
            siblings=tuple(SampleStart(i, tuple(tokens)) for i, tokens in enumerate(others, 1)),
        )

    def decode_leg(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        outputs: Sequence[int] = (),
        *,
        local: bool = False,
        cache_salt: str = "",
        **sampling: Any,
    ) -> DecodeLeg:
        role = Leg.LOCAL if local else Leg.DECODE
        request = self.request(role, prompt, max_tokens, outputs, cache_salt, **sampling)
        return DecodeLeg(
            self.loop_side,
            self.fabric,
            self._decode_metrics,
            self.tails,
            request,
        )

    def prefill_leg(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        ticket: pb.KVTicket | None,
        outputs: Sequence[int] = (),
        cache_salt: str = "",
        **sampling: Any,
    ) -> PrefillLeg:
        request = self.request(Leg.PREFILL, prompt, max_tokens, outputs, cache_salt, **sampling)
        return PrefillLeg(
            self.loop_side,
            self.fabric,
            self._prefill_metrics,
            request,
            None if ticket is None else ticket_of(ticket),
        )

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    async def assert_all_back(self) -> None:
        await eventually(lambda: self._engine_is_idle() and self._fabric_is_idle(), within_s=2)

    async def assert_fabric_idle(self) -> None:
        """Where the engine serves others, too."""
        await eventually(self._fabric_is_idle, within_s=2)

    def _engine_is_idle(self) -> bool:
        engine = self.engine.stats()
        idle = not engine.waiting + engine.running + engine.awaiting_kv
        return idle and engine.blocks.unused == self.engine.num_blocks

    def _fabric_is_idle(self) -> bool:
        fabric = self.fabric.stats()
        slots = fabric.send_slots_used + fabric.recv_slots_used
        return not slots + fabric.expected_transfers + fabric.outgoing_transfers


Event = TypeVar("Event", pb.GenerateEvent, pb.PrefillEvent)


class Events(list[Event]):
    """What a leg wrote; `until` waits for more of it."""

    def __init__(self) -> None:
        self._grown = asyncio.Event()

    async def write(self, event: Event) -> None:
        self.append(event)
        self._grown.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._grown.clear()
                await self._grown.wait()


class DecodeEvents(Events[pb.GenerateEvent]):
    """What a decode leg wrote."""

    @property
    def tickets(self) -> list[pb.KVTicket]:
        return [event.reserved for event in self if event.HasField("reserved")]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for event in self for token_id in event.tokens.token_ids]

    def tokens_of(self, sample: int, known: Sequence[int] = ()) -> list[int]:
        """Contiguous, behind those that were `known`."""
        told = list(known)
        for event in self:
            if event.HasField("tokens") and event.tokens.sample == sample:
                assert event.tokens.first_index == len(told)
                told += event.tokens.token_ids
        return told

    @property
    def prompt_logprobs(self) -> list[pb.TokenLogprobs]:
        return [entry for event in self for entry in event.prompt_logprobs.logprobs]

    @property
    def logprobs(self) -> list[pb.TokenLogprobs]:
        return [entry for event in self for entry in event.tokens.logprobs]


@contextmanager
def running_leg(leg: DecodeLeg) -> Iterator[tuple[DecodeEvents, "asyncio.Task[None]"]]:
    """A decode leg as a task, with what it writes."""
    events = DecodeEvents()
    task = asyncio.create_task(leg.run(events.write))
    try:
        yield events, task
    finally:
        task.cancel()


async def eventually(condition: Callable[[], bool], within_s: float = WAIT_S) -> None:
    """Another thread makes it true."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.001)


async def run_prefill(leg: PrefillLeg) -> Events[pb.PrefillEvent]:
    events: Events[pb.PrefillEvent] = Events()
    async with asyncio.timeout(WAIT_S):
        await leg.run(events.write)
    return events


def ticket_of(message: pb.KVTicket) -> Ticket:
    return Ticket(
        transfer_id=TransferId(message.transfer_id),
        shards=tuple(
            KVShard(shard.address, shard.generation, shard.first_head, shard.num_heads)
            for shard in message.shards
        ),
        fingerprint=message.fingerprint,
        facts=message.facts,
        first_token=message.first_token,
        num_tokens=message.num_tokens,
        block_size=message.block_size,
        codecs=tuple(message.codecs),
    )


_generations = itertools.count(1)


@contextmanager
def started_worker(model_path: Path, **engine_flags: object) -> Iterator[Worker]:
    """Runs on the calling loop. Serves grammars if there is a `vocabulary` among the flags."""
    vocabulary = engine_flags.pop("vocabulary", None)
    assert vocabulary is None or isinstance(vocabulary, Vocabulary)
    flags: dict[str, object] = {
        "num_blocks": 64,
        "max_model_len": 512,
        "token_budget": 64,
        "num_threads": 1,
        "dtype": "float32",
        **engine_flags,
    }
    engine = Engine(
        EngineConfig(model_path, device="cpu", **flags),  # type: ignore[arg-type]
        vocabulary=vocabulary,
    )
    config = FabricConfig(
        listen="inproc://",
        fingerprint=engine.fingerprint,
        facts=engine.kv_facts,
        generation=next(_generations),
        slot_nbytes=8 << 10,
        transfer_timeout_s=5.0,
    )
    fabric = Fabric(config, engine.copier.allocate_staging(config.staging_nbytes))
    fabric.start()
    loop_side = AsyncEngine(engine, observe_wait=lambda _: None)
    engine.start()
    try:
        yield Worker(engine, fabric, loop_side)
    finally:
        fabric.close()
        engine.stop()
