"""Requests and finish reasons as the control plane says them (protos/serving.proto)."""

from collections.abc import Sequence

from protos import serving_pb2 as pb
from router.progress import Progress
from router.request import FinishReason, TokenLogprobs, ValidPrompt

FINISH_REASONS = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


def generate_request(progress: Progress, local_prefill_reason: str | None) -> pb.GenerateRequest:
    """`local_prefill_reason` says why no prefill worker takes part; None: one does."""
    prompt = progress.prompt
    return pb.GenerateRequest(
        request_id=prompt.request_id,
        prompt_token_ids=prompt.token_ids,
        sampling=_sampling(progress),
        samples=samples(progress.resume),
        local_prefill=local_prefill_reason is not None,
        local_prefill_reason=local_prefill_reason or "",
        remaining_ms=_remaining_ms(progress),
        cache_salt=prompt.cache_salt,
    )


def prefill_request(
    progress: Progress, known: Sequence[Sequence[int] | None], ticket: pb.KVTicket | None
) -> pb.PrefillRequest:
    """`known` is the `Progress.resume` that the Generate stream was opened with: both legs of a
    request must agree on who samples token 0."""
    prompt = progress.prompt
    return pb.PrefillRequest(
        request_id=prompt.request_id,
        prompt_token_ids=prompt.token_ids,
        sampling=_sampling(progress),
        samples=samples(known),
        ticket=ticket,
        remaining_ms=_remaining_ms(progress),
        cache_salt=prompt.cache_salt,
    )


def samples(known: Sequence[Sequence[int] | None]) -> list[pb.Sample]:
    """See `Progress.resume`."""
    return [
        pb.Sample(is_finished=True) if token_ids is None else pb.Sample(output_token_ids=token_ids)
        for token_ids in known
    ]


def renew_request(
    prompt: ValidPrompt, ticket: pb.KVTicket, local_prefill_reason: str = ""
) -> pb.RenewRequest:
    """With a reason, decode computes what is missing itself."""
    return pb.RenewRequest(
        request_id=prompt.request_id,
        transfer_id=ticket.transfer_id,
        local_prefill_reason=local_prefill_reason,
    )


def finish_request(prompt: ValidPrompt, sample: int) -> pb.FinishRequest:
    return pb.FinishRequest(request_id=prompt.request_id, sample=sample)


def token_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    top = zip(message.top_token_ids, message.top_logprobs, strict=False)
    return TokenLogprobs(message.logprob, message.rank, tuple(top))


def prompt_logprobs(message: pb.PromptLogprobs) -> tuple[int, list[TokenLogprobs]]:
    return message.first_index, [token_logprobs(entry) for entry in message.logprobs]


def _sampling(progress: Progress) -> pb.Sampling:
    params = progress.prompt.sampling
    lacks_prompt = progress.lacks_prompt_logprobs
    return pb.Sampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=[pb.LogitBias(token_id=id, bias=bias) for id, bias in params.logit_bias],
        min_tokens=params.min_tokens,
        allowed_token_ids=params.allowed_token_ids,
        num_logprobs=params.num_logprobs,
        num_prompt_logprobs=params.num_prompt_logprobs if lacks_prompt else 0,
        bad_words=[pb.TokenSequence(token_ids=word) for word in params.bad_words],
        grammar=params.grammar,
    )


def _remaining_ms(progress: Progress) -> int:
    return max(1, int(progress.remaining_s * 1000))
