"""A prefill leg that fails costs time and not the answer."""

from collections.abc import Callable

import grpc
import pytest

from tests.router.dispatch_bench import ANSWER, Client, StartBench, make_prompt
from tests.router.fake_workers import GenerateCall, PrefillCall, until

STATUS = grpc.StatusCode


async def fail_at_once(call: PrefillCall) -> None:
    await call.fail(STATUS.UNAVAILABLE)


async def fail_after_token_0(call: PrefillCall) -> None:
    await call.first_token()
    await call.fail(STATUS.INTERNAL)


async def fall_silent(call: PrefillCall) -> None:
    await call.heartbeat()
    await call.hang()


async def end_early(call: PrefillCall) -> None:
    await call.heartbeat()


async def renewing(call: GenerateCall) -> None:
    """As a decode worker does: another ticket on the same stream."""
    first = await call.reserve()
    assert await call.beating(call.renewals.get()) == first
    second = await call.reserve()
    await call.relay.commit(second)
    await call.say_rest(0)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (fail_at_once, "unavailable"),
        (fail_after_token_0, "internal"),
        (fall_silent, "silent"),
        (end_early, "ended_early"),
    ],
)
async def test_a_failed_prefill_leg_goes_to_another_worker(
    start_bench: StartBench, fault: Callable[[PrefillCall], None], reason: str
) -> None:
    async with start_bench(num_prefills=2) as bench:
        bench.cluster.decodes[0].scripts.append(renewing)
        first, second = bench.cluster.prefills
        first.scripts.append(fault)  # type: ignore[arg-type]
        client = await bench.run()

        assert client.token_ids == list(ANSWER)
        assert len(bench.cluster.decodes[0].requests) == 1
        assert len(first.requests) == len(second.requests) == 1
        assert list(second.requests[0].samples[0].output_token_ids) == []
        assert bench.retries("prefill", reason) == 1


async def test_without_another_prefill_worker_decode_does_it_alone(
    start_bench: StartBench,
) -> None:
    async with start_bench() as bench:
        bench.cluster.prefills[0].scripts.append(fail_after_token_0)
        client = await bench.run()

        assert client.token_ids == list(ANSWER)
        reserved, local = bench.cluster.decodes[0].requests
        assert not reserved.local_prefill
        assert (local.local_prefill, local.local_prefill_reason) == (True, "no_prefill_worker")
        assert local.samples[0].output_token_ids == [ANSWER[0]]
        labels = {"reason": "no_prefill_worker"}
        assert bench.registry.get_sample_value("baton_local_prefills_total", labels) == 1


async def test_what_came_is_kept_when_no_prefill_worker_is_left(start_bench: StartBench) -> None:
    """The stream goes on, and decode computes the rest: the client has heard nothing yet."""
    async with start_bench(num_prefills=2) as bench:
        decode = bench.cluster.decodes[0]

        async def reserved_again(call: GenerateCall) -> None:
            for _ in bench.cluster.prefills:
                await call.reserve()
                await call.beating(call.renewals.get())
            await call.relay.commit(await call.reserve())
            await call.say_rest(0)

        decode.scripts.append(reserved_again)
        for prefill in bench.cluster.prefills:
            prefill.scripts.append(fail_at_once)
        client = await bench.run()

        assert client.token_ids == list(ANSWER)
        assert len(decode.requests) == 1
        assert [rest.local_prefill_reason for rest in decode.local_rests] == ["no_prefill_worker"]
        labels = {"reason": "no_prefill_worker"}
        assert bench.registry.get_sample_value("baton_local_prefills_total", labels) == 1


async def test_one_token_survives_its_prefill_worker(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        bench.cluster.prefills[0].scripts.append(fail_at_once)
        client = await bench.run(make_prompt(max_tokens=1))
        assert client.token_ids == [ANSWER[0]]
        assert bench.cluster.decodes[0].requests[0].local_prefill


async def test_a_second_ticket_voids_the_first_leg(start_bench: StartBench) -> None:
    async with start_bench() as bench:

        async def reserved_again(call: GenerateCall) -> None:
            await call.reserve()
            await until(lambda: bool(bench.cluster.prefills[0].requests))
            await call.relay.commit(await call.reserve())
            await call.say_rest(0)

        async def stuck(call: PrefillCall) -> None:
            while True:
                await call.heartbeat()
                await call.first_token()
                await call.hang()

        bench.cluster.decodes[0].scripts.append(reserved_again)
        bench.cluster.prefills[0].scripts.append(stuck)
        client = await bench.run()
        assert client.token_ids == list(ANSWER)
        assert len(bench.cluster.prefills[0].requests) == 2


@pytest.mark.parametrize("num_prefills", [1, 2])
async def test_a_worker_whose_transfers_are_lost_is_left(
    start_bench: StartBench, num_prefills: int
) -> None:
    """It says that all is well, and decode can install none of it: not for ever."""

    client = Client()

    async def losing(call: GenerateCall) -> None:
        await call.relay.commit(await call.reserve())
        await until(lambda: bool(client.token_ids))
        while True:
            await call.relay.commit(await call.reserve(replaces_lost=True))

    async with start_bench(num_prefills=num_prefills) as bench:
        bench.cluster.decodes[0].scripts.append(losing)
        await bench.dispatcher.run(make_prompt(), [client.take])

        assert client.token_ids == list(ANSWER)
        assert [len(p.requests) for p in bench.cluster.prefills] == [2] * num_prefills
        assert bench.retries("prefill", "transfer_lost") == num_prefills
        assert bench.cluster.decodes[0].requests[1].local_prefill


async def test_a_contradiction_resumes_from_what_was_delivered(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        client = Client()

        async def other_token(call: PrefillCall) -> None:
            await call.first_token(99)
            await until(lambda: client.token_ids == [99])
            await call.ship()

        bench.cluster.prefills[0].scripts.append(other_token)
        await bench.dispatcher.run(make_prompt(), [client.take])
        # What the client has stands; decode's own idea of index 0 does not.
        assert client.token_ids == [99, *ANSWER[1:]]
        assert bench.cluster.decodes[0].requests[1].samples[0].output_token_ids == [99]
        assert bench.cluster.prefills[0].requests[1].samples[0].output_token_ids == [99]
