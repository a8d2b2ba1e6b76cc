"""What fake workers tell of tokens, if they are asked."""

from collections.abc import Sequence

from protos import serving_pb2 as pb


def logprobs_of(token_ids: Sequence[int], count: int) -> list[pb.TokenLogprobs]:
    """Of each token -1 / (1 + id); of the likeliest, ids 0, 1, 2, …: 0, -1, -2, …."""
    if not count:
        return []
    top = list(range(count - 1))
    return [
        pb.TokenLogprobs(
            logprob=-1 / (1 + token_id),
            rank=count,
            top_token_ids=top,
            top_logprobs=[-index for index in top],
        )
        for token_id in token_ids
    ]


def prompt_logprobs_of(request: pb.GenerateRequest | pb.PrefillRequest) -> list[pb.PromptLogprobs]:
    """In chunks of two tokens."""
    count = request.sampling.num_prompt_logprobs
    entries = logprobs_of(request.prompt_token_ids[1:], count)
    return [
        pb.PromptLogprobs(first_index=1 + first, logprobs=entries[first : first + 2])
        for first in range(0, len(entries), 2)
    ]
