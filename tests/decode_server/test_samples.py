"""Several samples through one prefill leg and one transfer: in float32, sample i of n is what it is
alone, and nothing about the prompt is computed or moved twice."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from engine.swap_space import SwapSpace
from protos import serving_pb2 as pb
from tests.relay import DecodeEvents, Worker, run_prefill, running_leg, started_worker

DRAW = random.Random(11)
PROMPT = DRAW.choices(range(17, 49152), k=80)
TOKEN_NBYTES = 2 * 2 * 2 * 16 * 4
NUM_OUTPUTS = 12
N = 4
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 3}

Tokens = list[list[int]]


@dataclass
class Relay:
    prefill: Worker
    decode: Worker
    cold: Worker

    async def expected(self, prompt: Sequence[int], n: int = N, **sampling: Any) -> Tokens:
        """Each sample alone, by one engine."""
        told = []
        for sample in range(n):
            leg = self.cold.decode_leg(prompt, NUM_OUTPUTS, local=True, sample=sample, **sampling)
            with running_leg(leg) as (events, task):
                await task
                told.append(events.tokens_of(sample))
        return told

    async def serve(
        self, prompt: Sequence[int], known: Sequence[Sequence[int]] = ((),) * N, **sampling: Any
    ) -> DecodeEvents:
        """As the router does; all of the prompt comes by one transfer."""
        salt = token_hex()
        before = self.decode.engine.stats()
        first, *others = known
        resumed = [tokens for tokens in known if tokens]
        args = {"cache_salt": salt, **sampling}
        leg = self.decode.decode_leg(prompt, NUM_OUTPUTS, first, others=others, **args)
        with running_leg(leg) as (events, task):
            await events.until(lambda: bool(events.tickets))
            (ticket,) = events.tickets
            if resumed:
                prefill = self.prefill.prefill_leg(prompt, NUM_OUTPUTS, ticket, resumed[0], **args)
            else:
                prefill = self.prefill.prefill_leg(
                    prompt, NUM_OUTPUTS, ticket, others=others, **args
                )
            said = await run_prefill(prefill)
            await task
        assert len(events.tickets) == 1
        firsts = [event.first_token for event in said if event.HasField("first_token")]
        assert [one.sample for one in firsts] == ([] if resumed else list(range(len(known))))
        assert events[-1].finished.timings.kv_nbytes == len(prompt) * TOKEN_NBYTES
        stats = self.decode.engine.stats()
        assert stats.prompt_tokens_received - before.prompt_tokens_received == len(prompt)
        if not resumed:
            assert stats.prompt_tokens_computed == before.prompt_tokens_computed
        ended = [event.finished.sample for event in events if event.HasField("finished")]
        assert sorted(ended) == list(range(len(known)))
        return events

    async def assert_all_back(self) -> None:
        await self.prefill.assert_all_back()
        await self.decode.assert_all_back()
        await self.cold.assert_all_back()


def relay_of(
    stack: ExitStack, model: Path, prefill_block: int = 16, decode_block: int = 16, **decode: object
) -> Relay:
    return Relay(
        stack.enter_context(started_worker(model, block_size=prefill_block)),
        stack.enter_context(started_worker(model, block_size=decode_block, **decode)),
        stack.enter_context(started_worker(model, prefix_caching=False)),
    )


def told(events: DecodeEvents, known: Sequence[Sequence[int]] = ((),) * N) -> Tokens:
    return [events.tokens_of(sample, tokens) for sample, tokens in enumerate(known)]


PENALISED = {**HOT, "frequency_penalty": 1.0, "top_p": 0.9}
CASES = [(16, 16, HOT), (8, 32, HOT), (16, 8, HOT), (16, 8, {}), (16, 8, PENALISED)]


@pytest.mark.parametrize(("prefill_block", "decode_block", "sampling"), CASES)
async def test_n_samples_are_n_requests(
    tiny_llama: Path, prefill_block: int, decode_block: int, sampling: dict[str, Any]
) -> None:
    with ExitStack() as stack:
        relay = relay_of(stack, tiny_llama, prefill_block, decode_block)
        for length in (1, 15, 16, 17, 31, 32, 33, 64):
            prompt = PROMPT[:length]
            expected = await relay.expected(prompt, **sampling)
            assert told(await relay.serve(prompt, **sampling)) == expected
            assert (len({tuple(tokens) for tokens in expected}) == 1) == (not sampling)
        await relay.assert_all_back()


async def test_one_engine_alone(tiny_llama: Path) -> None:
    with ExitStack() as stack:
        relay = relay_of(stack, tiny_llama)
        for length in (1, 15, 16, 17, 80):
            prompt = PROMPT[:length]
            expected = await relay.expected(prompt, **HOT)
            before = relay.decode.engine.stats().prompt_tokens_computed
            leg = relay.decode.decode_leg(
                prompt,
                NUM_OUTPUTS,
                local=True,
                others=[()] * (N - 1),
                cache_salt=token_hex(),
                **HOT,
            )
            with running_leg(leg) as (events, task):
                await task
            assert told(events) == expected
            assert relay.decode.engine.stats().prompt_tokens_computed - before == length
        await relay.assert_all_back()


async def test_samples_are_resumed_where_each_was(tiny_llama: Path) -> None:
    with ExitStack() as stack:
        relay = relay_of(stack, tiny_llama, decode_block=8)
        for length in (15, 16, 33):
            prompt = PROMPT[:length]
            expected = await relay.expected(prompt, **HOT)
            for counts in ((3, 7, 0, 11), (0, 0, 1, 0), (9, 1, 1, 2)):
                pairs = zip(expected, counts, strict=True)
                known = [tokens[:count] for tokens, count in pairs]
                assert told(await relay.serve(prompt, known, **HOT), known) == expected
        await relay.assert_all_back()


@pytest.mark.parametrize("swap_memory", [0, 1 << 20])
async def test_memory_pressure_changes_no_token(
    tiny_llama: Path, swap_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SwapSpace, "is_cheaper", lambda self, num_tokens: True)
    with ExitStack() as stack:
        relay = relay_of(
            stack,
            tiny_llama,
            decode_block=4,
            num_blocks=18,
            max_model_len=72,
            swap_memory=swap_memory,
            prefix_caching=not swap_memory,  # else what gave way is found in the cache
        )
        prompts = [PROMPT[:22], PROMPT[22:44]]
        expected = [await relay.expected(prompt, **HOT) for prompt in prompts]
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert told(await relay.serve(prompt, **HOT)) == tokens
        legs = [
            relay.decode.decode_leg(prompt, NUM_OUTPUTS, local=True, others=[()] * (N - 1), **HOT)
            for prompt in prompts
        ]
        with running_leg(legs[0]) as (one, a), running_leg(legs[1]) as (two, b):
            await asyncio.gather(a, b)
        assert [told(one), told(two)] == expected
        stats = relay.decode.engine.stats()
        assert stats.preemptions > 0
        assert (stats.tokens_swapped_in > 0) == (swap_memory > 0)
        await relay.assert_all_back()


async def test_a_sample_may_end_at_its_first_token(tiny_llama: Path) -> None:
    with ExitStack() as stack:
        relay = relay_of(stack, tiny_llama)
        prompt = PROMPT[:21]
        firsts = [tokens[0] for tokens in await relay.expected(prompt, **HOT)]
        for ends in ({firsts[0]}, {firsts[1], firsts[3]}):
            sampling = {**HOT, "stop_token_ids": frozenset(ends)}
            expected = await relay.expected(prompt, **sampling)
            assert min(map(len, expected)) == 1 < max(map(len, expected))
            assert told(await relay.serve(prompt, **sampling)) == expected
        await relay.assert_all_back()


async def test_nothing_is_shipped_if_all_end_at_once(tiny_llama: Path) -> None:
    with ExitStack() as stack:
        relay = relay_of(stack, tiny_llama)
        prompt = PROMPT[:21]
        firsts = frozenset(tokens[0] for tokens in await relay.expected(prompt, **HOT))
        sampling = {**HOT, "stop_token_ids": firsts, "others": [()] * (N - 1)}
        with running_leg(relay.decode.decode_leg(prompt, NUM_OUTPUTS, **sampling)) as (events, _):
            await events.until(lambda: bool(events.tickets))
            said = await run_prefill(
                relay.prefill.prefill_leg(prompt, NUM_OUTPUTS, events.tickets[0], **sampling)
            )
        reasons = [event.first_token.finish_reason for event in said[:-1]]
        assert reasons == [pb.FINISH_REASON_STOP] * N
        await relay.assert_all_back()


async def test_the_stream_is_the_lease_of_all_samples(tiny_llama: Path) -> None:
    with ExitStack() as stack:
        relay = relay_of(stack, tiny_llama)
        sampling = {**HOT, "others": [()] * (N - 1)}
        with running_leg(relay.decode.decode_leg(PROMPT, 300, **sampling)) as (events, task):
            await events.until(lambda: bool(events.tickets))
            await run_prefill(relay.prefill.prefill_leg(PROMPT, 300, events.tickets[0], **sampling))
            await events.until(lambda: all(map(events.tokens_of, range(N))))
            task.cancel()
        await relay.assert_all_back()


async def test_a_sample_that_had_ended_is_only_told_of(tiny_llama: Path) -> None:
    """The worker before died between the end token and its `finished`."""
    with ExitStack() as stack:
        relay = relay_of(stack, tiny_llama)
        leg = relay.decode.decode_leg(
            PROMPT[:9],
            NUM_OUTPUTS,
            (7, 5),
            local=True,
            others=[(7,), (5,)],
            stop_token_ids=frozenset([5]),
        )
        with running_leg(leg) as (events, task):
            await task
        first, second = events[0].finished, events[1].finished
        assert [first.sample, second.sample] == [0, 2]
        assert not events.tokens_of(0)
        assert len(events.tokens_of(1, [7])) > 1
        await relay.assert_all_back()


@pytest.mark.parametrize("is_local", [False, True])
async def test_a_sample_of_which_no_more_is_wanted_ends_alone(
    tiny_llama: Path, is_local: bool
) -> None:
    with ExitStack() as stack:
        relay = relay_of(stack, tiny_llama)
        prompt, num_outputs = PROMPT[:21], 60
        expected = []
        for sample in range(N):
            alone = relay.cold.decode_leg(prompt, num_outputs, local=True, sample=sample, **HOT)
            with running_leg(alone) as (events, task):
                await task
                expected.append(events.tokens_of(sample))
        sampling = {**HOT, "others": [()] * (N - 1)}
        leg = relay.decode.decode_leg(prompt, num_outputs, local=is_local, **sampling)
        with running_leg(leg) as (events, task):
            if not is_local:
                await events.until(lambda: bool(events.tickets))
                await run_prefill(
                    relay.prefill.prefill_leg(prompt, num_outputs, events.tickets[0], **sampling)
                )
            await events.until(lambda: all(map(events.tokens_of, range(N))))
            leg.finish(0)
            leg.finish(2)
            await task
        for sample, tokens in enumerate(told(events)):
            wanted = expected[sample]
            assert tokens == (wanted[: len(tokens)] if sample in (0, 2) else wanted)
        finished = [event.finished for event in events if event.HasField("finished")]
        ends = {one.sample: one.reason for one in finished}
        assert len(finished) == N
        assert ends[0] == ends[2] == pb.FINISH_REASON_STOP
        assert ends[1] == ends[3] == pb.FINISH_REASON_LENGTH
        assert not any(event.HasField("tokens") and not event.tokens.token_ids for event in events)
        assert relay.decode.engine.stats().output_tokens_computed < N * (num_outputs - 1)
        await relay.assert_all_back()
