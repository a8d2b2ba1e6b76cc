"""Dispatch when all goes well: which calls are made, and who gets them."""

import grpc
import pytest

from protos import serving_pb2 as pb
from router.errors import RequestTimedOut
from router.request import FinishReason
from tests.router.dispatch_bench import ANSWER, Client, StartBench, make_prompt
from tests.router.fake_workers import GenerateCall, PrefillCall, until

STATUS = grpc.StatusCode


async def test_two_calls_and_one_answer(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        client = await bench.run()

        assert client.token_ids == list(ANSWER)
        assert client.finish_reason is FinishReason.STOP
        (generate,) = bench.cluster.decodes[0].requests
        (prefill,) = bench.cluster.prefills[0].requests
        assert not generate.local_prefill
        assert generate.prompt_token_ids == prefill.prompt_token_ids == [1, 2, 3]
        assert generate.sampling == prefill.sampling
        assert generate.sampling == pb.Sampling(
            max_tokens=50,
            temperature=0.5,
            top_k=7,
            top_p=0.25,
            seed=1 << 63,
            stop_token_ids=[9],
            ignore_eos=True,
            min_p=0.125,
            presence_penalty=-1.5,
            frequency_penalty=1.25,
            repetition_penalty=1.5,
            logit_bias=[pb.LogitBias(token_id=5, bias=-100), pb.LogitBias(token_id=6, bias=0.5)],
            min_tokens=1,
            allowed_token_ids=[5, 11],
            bad_words=[pb.TokenSequence(token_ids=[1, 2]), pb.TokenSequence(token_ids=[3])],
        )
        assert [len(call.samples) for call in (generate, prefill)] == [1, 1]
        assert 0 < generate.remaining_ms <= 5000
        assert prefill.ticket.num_tokens == 3


async def test_token_0_goes_out_before_the_transfer_ends(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        client = Client()
        shipping = bench.cluster.relay

        async def slow(call: PrefillCall) -> None:
            await call.first_token()
            await until(lambda: client.token_ids == [ANSWER[0]])
            assert not shipping.commits[call.request.ticket.transfer_id].done()
            await call.ship()

        bench.cluster.prefills[0].scripts.append(slow)
        await bench.dispatcher.run(make_prompt(), [client.take])
        assert client.token_ids == list(ANSWER)


async def test_a_token_0_that_ends_the_answer(start_bench: StartBench) -> None:
    async with start_bench() as bench:

        async def only(call: PrefillCall) -> None:
            await call.first_token(reason=pb.FINISH_REASON_STOP)
            await call.hang()

        bench.cluster.prefills[0].scripts.append(only)
        client = await bench.run()
        assert client.token_ids == [ANSWER[0]]
        assert client.finish_reason is FinishReason.STOP


async def test_one_token_needs_no_handoff(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        client = await bench.run(make_prompt(max_tokens=1))
        assert client.token_ids == [ANSWER[0]]
        assert client.finish_reason is FinishReason.LENGTH
        assert bench.cluster.decodes[0].requests == []
        assert not bench.cluster.prefills[0].requests[0].HasField("ticket")


async def test_colocated(start_bench: StartBench) -> None:
    async with start_bench(mode="colocated") as bench:
        for max_tokens in (50, 1):
            client = await bench.run(make_prompt(max_tokens))
            assert client.token_ids == list(ANSWER[:max_tokens])
        for request in bench.cluster.decodes[0].requests:
            assert (request.local_prefill, request.local_prefill_reason) == (True, "colocated")
        assert bench.cluster.prefills[0].requests == []


async def test_a_client_that_has_enough_ends_both_legs(start_bench: StartBench) -> None:
    async with start_bench() as bench:

        async def endless(call: GenerateCall) -> None:
            await call.reserve()
            for index, token_id in enumerate(ANSWER):
                await call.tokens(index, [token_id])
            await call.hang()

        bench.cluster.decodes[0].scripts.append(endless)
        client = await bench.run(wanted=2)
        assert client.token_ids == list(ANSWER[:2])


async def test_a_draining_worker_gets_nothing(start_bench: StartBench) -> None:
    async with start_bench(num_decodes=2) as bench:
        bench.cluster.decodes[0].status.draining = True
        await until(lambda: not bench.workers.decodes[0].is_ready)
        await bench.run()
        assert bench.cluster.decodes[0].requests == []


async def test_a_request_has_a_deadline(start_bench: StartBench) -> None:
    async with start_bench(request_timeout_s=0.3) as bench:

        async def slow(call: GenerateCall) -> None:
            await call.reserve()
            await call.hang()

        bench.cluster.decodes[0].scripts.append(slow)
        with pytest.raises(RequestTimedOut):
            await bench.run()


async def test_workers_are_used_in_turn(start_bench: StartBench) -> None:
    async with start_bench(num_prefills=2, num_decodes=2) as bench:
        for _ in range(4):
            await bench.run()
        assert [len(worker.requests) for worker in bench.cluster.workers] == [2, 2, 2, 2]


async def test_a_pair_must_agree_on_what_kv_means(start_bench: StartBench) -> None:
    async with start_bench(num_prefills=2) as bench:
        stranger = bench.cluster.prefills[0]
        stranger.status.fingerprint = b"g" * 32
        await until(lambda: bench.workers.prefills[0].fingerprint == b"g" * 32)
        for _ in range(3):
            await bench.run()
        assert stranger.requests == []


async def test_a_worker_of_the_wrong_role_is_never_ready(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        bench.cluster.decodes[0].status.role = pb.ROLE_PREFILL
        await until(lambda: not bench.workers.decodes[0].is_ready)
        assert not bench.dispatcher.is_ready
