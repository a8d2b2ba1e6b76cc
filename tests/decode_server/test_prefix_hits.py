"""Prefix hits through both workers: what is then not computed, not shipped, not asked for, and
what is told of it."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos import serving_pb2 as pb
from tests.relay import DecodeEvents, Worker, eventually, run_prefill, running_leg, started_worker

DRAW = random.Random(5)
PROMPT = DRAW.choices(range(17, 49152), k=256)
NUM_OUTPUTS = 6
TOKEN_NBYTES = 2 * 2 * 2 * 16 * 4


@dataclass
class Handoff:
    """One request from end to end."""

    events: DecodeEvents
    ticket: pb.KVTicket | None
    first: pb.FirstToken | None

    @property
    def num_cached(self) -> int:
        """As decode tells it, once."""
        return sum(event.tokens.num_cached_tokens for event in self.events)

    @property
    def kv_nbytes(self) -> int:
        return self.events[-1].finished.timings.kv_nbytes


@dataclass
class Relay:
    """Two workers that keep what they have seen, and one that does not."""

    prefill: Worker
    decode: Worker
    cold: Worker

    async def expected(self, prompt: list[int]) -> list[int]:
        with running_leg(self.cold.decode_leg(prompt, NUM_OUTPUTS, local=True)) as (events, task):
            await task
            return events.token_ids

    async def serve(self, prompt: list[int], cache_salt: str = "") -> Handoff:
        """As the router does: a prefill leg if there is a ticket."""
        leg = self.decode.decode_leg(prompt, NUM_OUTPUTS, cache_salt=cache_salt)
        with running_leg(leg) as (events, task):
            await events.until(lambda: bool(events.tickets or events.token_ids))
            if not events.tickets:
                await task
                return Handoff(events, None, None)
            (ticket,) = events.tickets
            said = await run_prefill(
                self.prefill.prefill_leg(prompt, NUM_OUTPUTS, ticket, cache_salt=cache_salt)
            )
            await task
            return Handoff(events, ticket, said[0].first_token)


@contextmanager
def relay_of(model: Path, **engine_flags: object) -> Iterator[Relay]:
    with (
        started_worker(model, **engine_flags) as prefill,
        started_worker(model, **engine_flags) as decode,
        started_worker(model, prefix_caching=False) as cold,
    ):
        yield Relay(prefill, decode, cold)


@pytest.fixture
async def relay(tiny_llama: Path) -> AsyncIterator[Relay]:
    with relay_of(tiny_llama) as relay:
        yield relay
        for worker in (relay.prefill, relay.decode, relay.cold):
            await worker.assert_all_back()


async def test_the_ticket_asks_only_for_what_is_not_cached(relay: Relay) -> None:
    """The second prompt shares 128 tokens and a bit: computed and shipped once."""
    other = PROMPT[:130] + PROMPT[:70]
    first = await relay.serve(PROMPT)
    assert first.ticket is not None
    assert first.first is not None
    assert first.ticket.first_token == first.first.num_cached_tokens == first.num_cached == 0
    computed = relay.prefill.engine.stats().prompt_tokens_computed
    second = await relay.serve(other)
    assert second.ticket is not None
    assert second.first is not None
    assert second.ticket.first_token == second.first.num_cached_tokens == second.num_cached == 128
    assert second.events.token_ids == await relay.expected(other)
    assert second.kv_nbytes == (200 - 128) * TOKEN_NBYTES
    assert relay.prefill.engine.stats().prompt_tokens_computed == computed + 200 - 128
    stats = relay.decode.engine.stats()
    assert (stats.prompt_tokens_received, stats.prompt_tokens_hit) == (256 + 200 - 128, 128)
    assert stats.prompt_tokens_computed == 0


async def test_prefill_ships_what_only_it_has_cached(relay: Relay) -> None:
    """And its hit counts, although decode had none."""
    await run_prefill(relay.prefill.prefill_leg(PROMPT, 1, None))
    served = await relay.serve(PROMPT)
    assert served.ticket is not None
    assert served.ticket.first_token == 0
    assert served.events.token_ids == await relay.expected(PROMPT)
    assert served.num_cached == 240
    assert served.kv_nbytes == 256 * TOKEN_NBYTES
    stats = relay.prefill.engine.stats()
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_hit) == (256 + 16, 240)


async def test_a_full_hit_needs_no_prefill_leg(relay: Relay) -> None:
    """All but the last block is cached: no ticket, the tokens at once; and it is counted."""
    prompt = PROMPT[:250]
    first = await relay.serve(prompt)
    second = await relay.serve(prompt)
    assert first.ticket is not None
    assert second.ticket is None
    assert second.events.token_ids == first.events.token_ids == await relay.expected(prompt)
    assert (first.num_cached, second.num_cached) == (0, 240)
    assert relay.decode.engine.stats().prompt_tokens_computed == 10
    assert relay.decode.value("baton_local_prefills_total", reason="prefix_hit") == 1


async def test_salts_share_nothing(relay: Relay) -> None:
    expected = await relay.expected(PROMPT)
    for salt in ("", "a", "b"):
        served = await relay.serve(PROMPT, salt)
        assert served.ticket is not None
        assert served.ticket.first_token == served.num_cached == 0
        assert served.events.token_ids == expected
    assert (await relay.serve(PROMPT, "a")).num_cached == 240


async def test_a_second_leg_that_finds_the_first_one_s_work_is_no_hit(relay: Relay) -> None:
    """The request was cold, whatever its renewed ticket finds."""
    decode_leg = relay.decode.decode_leg(PROMPT, NUM_OUTPUTS)
    with running_leg(decode_leg) as (events, task):
        await events.until(lambda: len(events.tickets) == 1)
        leg = relay.prefill.prefill_leg(PROMPT, NUM_OUTPUTS, events.tickets[0])
        prefill = asyncio.create_task(run_prefill(leg))
        await eventually(lambda: relay.decode.fabric.stats().received_frames >= 2)
        decode_leg.renew(events.tickets[0].transfer_id)
        await events.until(lambda: len(events.tickets) == 2)
        await asyncio.gather(prefill, return_exceptions=True)
        leg = relay.prefill.prefill_leg(PROMPT, NUM_OUTPUTS, events.tickets[1])
        said = await run_prefill(leg)
        await task
    assert said[0].first_token.num_cached_tokens > 0
    assert Handoff(events, None, None).num_cached == 0
    assert events.token_ids == await relay.expected(PROMPT)


def repeated_bodies(count: int) -> list[list[int]]:
    """Prompts that begin with parts of a few long bodies and end each in its own way."""
    draw = random.Random(11)
    bodies = [draw.choices(range(17, 49152), k=300) for _ in range(4)]
    prompts = []
    for _ in range(count):
        body = draw.choice(bodies)[: draw.choice((40, 160, 256, 300))]
        prompts.append(body + draw.choices(range(17, 49152), k=draw.choice((0, 0, 1, 9, 30))))
    return prompts


@pytest.mark.parametrize("num_blocks", [512, 64], ids=["roomy", "evicting"])
async def test_hits_never_change_tokens(tiny_llama: Path, num_blocks: int) -> None:
    """300 prompts, eight at a time, against the same prompts without any cache."""
    prompts = repeated_bodies(300 if num_blocks == 512 else 60)
    gate = asyncio.Semaphore(8)

    async def serve(relay: Relay, prompt: list[int]) -> None:
        async with gate:
            served = await relay.serve(prompt)
            assert served.events.token_ids == await relay.expected(prompt), len(prompt)

    with relay_of(tiny_llama, num_blocks=num_blocks, token_budget=128) as relay:
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(serve(relay, prompt))
        for worker in (relay.prefill, relay.decode):
            await worker.assert_all_back()
            assert worker.engine.stats().prompt_tokens_hit > 20 * len(prompts)
        assert relay.decode.value("baton_local_prefills_total", reason="prefix_hit") > 0
