"""What a COMMIT frame carries, checked: another process wrote it.

The checksum says that it is what was sent, not that it makes sense. What does not costs its
transfer, as any other bad frame does: another ticket, and in the end another prefill worker. The
client has sent nothing wrong and hears nothing of it.
"""

import math
from typing import NamedTuple

from google.protobuf.message import DecodeError

from decode_server.messages import first_token_of
from engine.request import EngineRequest, FirstToken
from kvfabric.errors import BadFrame
from protos import serving_pb2 as pb


class Commit(NamedTuple):
    """Token 0 of each sample, or of none: then this engine samples its own."""

    first_tokens: dict[int, FirstToken]
    num_cached_tokens: int
    """The prefill worker's prefix hit."""


def read_commit(payload: bytes, request: EngineRequest, vocab_size: int) -> Commit:
    """Raises `BadFrame` for what no prefill leg of this request says."""
    try:
        told = pb.Commit.FromString(payload).first_tokens
    except DecodeError as error:
        raise BadFrame(f"COMMIT carries no message of ours: {error}") from error
    samples = [one.sample for one in request.each()]
    if told and sorted(first.sample for first in told) != sorted(samples):
        raise BadFrame(f"COMMIT has {len(told)} first tokens, and not one for each of {samples}")
    if told and any(one.output_token_ids for one in request.each()):
        raise BadFrame("COMMIT has first tokens of a request that has output tokens")
    for first in told:
        _check(first, request, vocab_size)
    return Commit(
        {first.sample: first_token_of(first) for first in told},
        max((first.num_cached_tokens for first in told), default=0),
    )


def _check(first: pb.FirstToken, request: EngineRequest, vocab_size: int) -> None:
    if first.token_id >= vocab_size:
        raise BadFrame(f"COMMIT has token {first.token_id} of a vocabulary of {vocab_size}")
    if first.num_cached_tokens > len(request.prompt_token_ids):
        raise BadFrame(f"COMMIT says that {first.num_cached_tokens} prompt tokens were cached")
    num_logprobs = request.sampling.num_logprobs
    if first.HasField("logprobs") != bool(num_logprobs):
        raise BadFrame("COMMIT has logprobs where none are wanted, or none where they are")
    if num_logprobs:
        _check_logprobs(first.logprobs, num_logprobs - 1, vocab_size)


def _check_logprobs(told: pb.TokenLogprobs, num_top: int, vocab_size: int) -> None:
    ids, values = told.top_token_ids, told.top_logprobs
    if not len(ids) == len(values) <= num_top or any(i >= vocab_size for i in ids):
        raise BadFrame(f"COMMIT has {len(ids)} likely tokens and {len(values)} logprobs of them")
    if any(math.isnan(value) for value in (told.logprob, *values)):
        raise BadFrame("COMMIT has a logprob that is no number")
