"""Relays whose last chunk leaves by groups of layers: in mid-step, broken off there, failed there.

The engine thread is held up in the midst of the step, as soon as it has told of layers, until the
other side has them.
"""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engine.errors import EngineError, OutOfDeviceMemory
from engine.request import EngineEvent, LayersComputed
from protos import serving_pb2 as pb
from tests.relay import DecodeEvents, Worker, eventually, run_prefill, running_leg, started_worker

PROMPT = random.Random(5).choices(range(17, 49152), k=200)  # two chunks of 100
KV_NBYTES = 512  # of a token
WAIT_S = 10.0


class Relay:
    """`in_mid_step` is called by the prefill engine's thread, layers told of, others not begun."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.prefill, self.decode = prefill, decode
        self.in_mid_step: Callable[[], None] = lambda: None
        self.told: list[LayersComputed] = []
        deliver = prefill.engine.on_events

        def on_events(events: list[EngineEvent]) -> None:
            deliver(events)
            layers = [event for event in events if isinstance(event, LayersComputed)]
            self.told += layers
            if any(one.num_layers == 1 for one in layers):
                self.in_mid_step()

        prefill.engine.on_events = on_events

    def wait_for_first_layers(self) -> None:
        """All of what is computed is installed on decode: whole blocks of the first chunk, and of
        the rest layer 1 of 2."""
        nbytes = (96 + 104 // 2) * KV_NBYTES
        came = threading.Event()
        for _ in range(int(WAIT_S / 0.01)):
            if self.decode.fabric.stats().received_nbytes >= nbytes:
                assert self.decode.fabric.stats().received_nbytes == nbytes
                return
            came.wait(0.01)
        raise AssertionError(self.decode.fabric.stats())

    async def expected(self, num_tokens: int) -> list[int]:
        leg = self.decode.decode_leg(PROMPT, num_tokens, local=True, cache_salt="alone")
        with running_leg(leg) as (events, task):
            await task
            return events.token_ids


@pytest.fixture
async def relay(tiny_llama: Path) -> AsyncIterator[Relay]:
    with (
        started_worker(tiny_llama, token_budget=100) as prefill,
        started_worker(tiny_llama) as decode,
    ):
        yield Relay(prefill, decode)
        await prefill.assert_all_back()
        await decode.assert_all_back()


async def ticket(events: DecodeEvents, index: int = 0) -> pb.KVTicket:
    await events.until(lambda: len(events.tickets) > index)
    return events.tickets[index]


async def test_first_layers_are_installed_before_the_last_is_computed(relay: Relay) -> None:
    expected = await relay.expected(6)
    relay.in_mid_step = relay.wait_for_first_layers
    with running_leg(relay.decode.decode_leg(PROMPT, 6)) as (events, task):
        await run_prefill(relay.prefill.prefill_leg(PROMPT, 6, await ticket(events)))
        await task
    assert [(one.num_computed_tokens, one.num_layers) for one in relay.told] == [
        (200, 1),
        (200, 2),
    ]
    assert events.token_ids == expected
    assert events[-1].finished.timings.kv_nbytes == 200 * KV_NBYTES


async def test_a_step_that_fails_between_layers_costs_a_ticket_for_its_tokens(
    relay: Relay,
) -> None:
    """What decode has of the broken chunk lacks a layer: it is asked for again."""
    expected = await relay.expected(6)

    def fail() -> None:
        relay.wait_for_first_layers()
        relay.in_mid_step = lambda: None
        raise OutOfDeviceMemory("in mid-step")

    relay.in_mid_step = fail
    with running_leg(relay.decode.decode_leg(PROMPT, 6)) as (events, task):
        with pytest.raises(EngineError, match="in mid-step"):
            await run_prefill(relay.prefill.prefill_leg(PROMPT, 6, await ticket(events)))
        second = await ticket(events, 1)
        assert (second.first_token, second.replaces_lost) == (96, True)
        await run_prefill(relay.prefill.prefill_leg(PROMPT, 6, second))
        await task
    assert events.token_ids == expected


async def test_cancel_between_layers_gives_all_back(relay: Relay) -> None:
    cancelled = threading.Event()

    def hold() -> None:
        relay.wait_for_first_layers()
        asyncio_loop.call_soon_threadsafe(cancel)
        assert cancelled.wait(WAIT_S)

    def cancel() -> None:
        prefill.cancel()
        task.cancel()
        asyncio_loop.call_later(0.05, cancelled.set)  # both legs are over in mid-step

    relay.in_mid_step = hold
    asyncio_loop = asyncio.get_running_loop()
    with running_leg(relay.decode.decode_leg(PROMPT, 6)) as (events, task):
        leg = relay.prefill.prefill_leg(PROMPT, 6, await ticket(events))
        prefill = asyncio.create_task(run_prefill(leg))
        await asyncio.gather(task, prefill, return_exceptions=True)
    assert prefill.cancelled()
    await eventually(cancelled.is_set)


async def test_a_short_step_is_told_of_once(relay: Relay) -> None:
    prompt = PROMPT[:150]
    with running_leg(relay.decode.decode_leg(prompt, 3)) as (events, task):
        await run_prefill(relay.prefill.prefill_leg(prompt, 3, await ticket(events)))
        await task
    assert [(one.num_computed_tokens, one.num_layers) for one in relay.told] == [(150, 2)]
