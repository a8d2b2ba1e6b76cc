"""What a peer may ask of an engine: taken as it is meant, or refused with a text that names it."""

import math

import pytest

from engine.errors import InvalidRequest
from engine.request import EngineRequest, Leg, RequestId, SamplingParams
from engine.request_message import engine_request
from protos import serving_pb2 as pb

VOCAB_SIZE = 100


def taken(**changes: object) -> EngineRequest:
    off: dict[str, object] = {"max_tokens": 9, "top_p": 1.0, "repetition_penalty": 1.0}
    sampling = pb.Sampling(**{**off, **changes})  # type: ignore[arg-type]
    message = pb.GenerateRequest(prompt_token_ids=[1], sampling=sampling, samples=[pb.Sample()])
    return engine_request(message, Leg.LOCAL, RequestId("r"), VOCAB_SIZE)


def test_off_is_the_engine_s_default() -> None:
    assert taken().sampling == SamplingParams(max_tokens=9)


def test_everything_is_carried_over() -> None:
    request = taken(
        min_p=0.5,
        presence_penalty=2,
        frequency_penalty=-2,
        repetition_penalty=0.5,
        logit_bias=[pb.LogitBias(token_id=99, bias=-100)],
        min_tokens=9,
        allowed_token_ids=[1, 99],
        bad_words=[pb.TokenSequence(token_ids=[1, 2])],
        num_logprobs=21,
        num_prompt_logprobs=1,
    )
    assert request.sampling == SamplingParams(
        max_tokens=9,
        min_p=0.5,
        presence_penalty=2,
        frequency_penalty=-2,
        repetition_penalty=0.5,
        logit_bias=((99, -100.0),),
        min_tokens=9,
        allowed_token_ids=(1, 99),
        bad_words=((1, 2),),
        num_logprobs=21,
        num_prompt_logprobs=1,
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"min_tokens": 10}, "min_tokens"),
        ({"logit_bias": [pb.LogitBias(token_id=1, bias=101)]}, "logit_bias"),
        ({"logit_bias": [pb.LogitBias(token_id=1, bias=math.nan)]}, "logit_bias"),
        ({"logit_bias": [pb.LogitBias(token_id=100)]}, "100"),
        ({"allowed_token_ids": [100]}, "100"),
        ({"stop_token_ids": [100]}, "100"),
        ({"bad_words": [pb.TokenSequence(token_ids=[100])]}, "100"),
        ({"bad_words": [pb.TokenSequence()]}, "bad_words"),
        ({"num_logprobs": 22}, "21 likeliest"),
        ({"num_prompt_logprobs": 22}, "21 likeliest"),
    ],
)
def test_refusals_name_what_is_wrong(change: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        taken(**change)


def samples_taken(leg: Leg, *samples: pb.Sample) -> list[tuple[int, tuple[int, ...]]]:
    sampling = pb.Sampling(max_tokens=4, top_p=1.0, repetition_penalty=1.0)
    message = pb.GenerateRequest(prompt_token_ids=[1], sampling=sampling, samples=samples)
    request = engine_request(message, leg, RequestId("r"), VOCAB_SIZE)
    return [(one.sample, one.output_token_ids) for one in request.each()]


def test_samples_that_have_ended_are_left_out() -> None:
    known = [
        pb.Sample(is_finished=True),
        pb.Sample(),
        pb.Sample(output_token_ids=[7, 8]),
        pb.Sample(is_finished=True, output_token_ids=[9]),
    ]
    for leg in (Leg.DECODE, Leg.LOCAL):
        assert samples_taken(leg, *known) == [(1, ()), (2, (7, 8))]
    # It samples nothing then: one that has outputs stands for all.
    assert samples_taken(Leg.PREFILL, *known) == [(2, (7, 8))]
    assert samples_taken(Leg.PREFILL, *known[:2], pb.Sample()) == [(1, ()), (2, ())]


@pytest.mark.parametrize(
    ("samples", "named"),
    [
        ([], "no sample"),
        ([pb.Sample(is_finished=True)], "no sample"),
        ([pb.Sample()] * 129, "129 samples"),
        ([pb.Sample(), pb.Sample(output_token_ids=[100])], "100"),
        ([pb.Sample(), pb.Sample(output_token_ids=[1] * 4)], "4 of max_tokens 4"),
    ],
)
def test_samples_are_refused(samples: list[pb.Sample], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        samples_taken(Leg.DECODE, *samples)
