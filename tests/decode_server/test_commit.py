"""A COMMIT that makes no sense costs its transfer, and neither the answer nor the worker."""

import math

import pytest

from decode_server.commit import read_commit
from engine.request import EngineRequest, FirstToken, Leg, RequestId, SampleStart, SamplingParams
from kvfabric.errors import BadFrame
from kvfabric.outgoing import Outgoing
from protos import serving_pb2 as pb
from tests.decode_server.test_broken_off import relay as relay
from tests.decode_server.test_leg import PROMPT, Relay, ticket
from tests.relay import run_prefill, running_leg

VOCAB_SIZE = 100


def request(outputs: tuple[int, ...] = (), num_logprobs: int = 0) -> EngineRequest:
    """Of samples 0 and 1."""
    sampling = SamplingParams(max_tokens=5, num_logprobs=num_logprobs)
    siblings = (SampleStart(1),)
    return EngineRequest(
        RequestId("r"), Leg.DECODE, (1, 2, 3), sampling, outputs, siblings=siblings
    )


def first(sample: int, token_id: int = 7, **more: object) -> pb.FirstToken:
    return pb.FirstToken(sample=sample, token_id=token_id, **more)  # type: ignore[arg-type]


def logprobs(*top: int, values: int | None = None, logprob: float = -1.0) -> pb.TokenLogprobs:
    told = [-2.0] * (len(top) if values is None else values)
    return pb.TokenLogprobs(logprob=logprob, rank=1, top_token_ids=top, top_logprobs=told)


def test_what_a_prefill_leg_says_is_read() -> None:
    told = pb.Commit(first_tokens=[first(1, 9), first(0, num_cached_tokens=2)])
    commit = read_commit(told.SerializeToString(), request(), VOCAB_SIZE)
    assert commit == ({0: FirstToken(7), 1: FirstToken(9)}, 2)
    assert read_commit(b"", request((5,)), VOCAB_SIZE) == ({}, 0)
    told = pb.Commit(first_tokens=[first(i, logprobs=logprobs(3, 4)) for i in (0, 1)])
    commit = read_commit(told.SerializeToString(), request(num_logprobs=3), VOCAB_SIZE)
    assert commit.first_tokens[1].logprobs is not None


@pytest.mark.parametrize(
    ("payload", "asked"),
    [
        (b"\xff\xff", request()),
        ([first(0)], request()),
        ([first(0), first(0)], request()),
        ([first(0), first(2)], request()),
        ([first(0), first(1), first(1)], request()),
        ([first(0), first(1)], request((5,))),
        ([first(0), first(1, VOCAB_SIZE)], request()),
        ([first(0), first(1, 2**32 - 1)], request()),
        ([first(0), first(1, num_cached_tokens=4)], request()),
        ([first(0), first(1, logprobs=logprobs())], request()),
        ([first(0), first(1)], request(num_logprobs=1)),
        ([first(0, logprobs=logprobs()), first(1, logprobs=logprobs(1))], request(num_logprobs=1)),
        ([first(i, logprobs=logprobs(1, 2, values=1)) for i in (0, 1)], request(num_logprobs=3)),
        ([first(i, logprobs=logprobs(VOCAB_SIZE)) for i in (0, 1)], request(num_logprobs=3)),
        ([first(i, logprobs=logprobs(logprob=math.nan)) for i in (0, 1)], request(num_logprobs=1)),
    ],
)
def test_what_none_says_is_a_bad_frame(
    payload: bytes | list[pb.FirstToken], asked: EngineRequest
) -> None:
    if not isinstance(payload, bytes):
        payload = pb.Commit(first_tokens=payload).SerializeToString()
    with pytest.raises(BadFrame, match="COMMIT"):
        read_commit(payload, asked, VOCAB_SIZE)


@pytest.mark.parametrize(
    "payload",
    [b"\xff", pb.Commit(first_tokens=[first(0, 1 << 31)]).SerializeToString()],
    ids=["junk", "no token"],
)
async def test_it_costs_a_ticket_and_not_the_answer(
    relay: Relay, payload: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await relay.expected(PROMPT, 6)
    with running_leg(relay.decode.decode_leg(PROMPT, 6)) as (events, task):
        with monkeypatch.context() as hostile:
            commit = Outgoing.commit
            hostile.setattr(Outgoing, "commit", lambda self, _: commit(self, payload))
            await run_prefill(relay.prefill.prefill_leg(PROMPT, 6, await ticket(events)))
        again = await ticket(events, 1)
        assert again.replaces_lost
        assert again.first_token == len(PROMPT) - 16, "only what a leg must have is sent again"
        await run_prefill(relay.prefill.prefill_leg(PROMPT, 6, again))
        await task
    assert events.token_ids == expected
    assert relay.decode.value("baton_transfers_lost_total", error="BadFrame") == 1
