"""Each index is delivered once, and never contradicted."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import Reopen
from router.progress import Progress
from router.request import FinishReason, RequestId, SamplingParams, TokenLogprobs, ValidPrompt

ANSWER = [5, 6, 7, 8, 9]
SAMPLING = SamplingParams(
    max_tokens=5,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    seed=1,
    stop_token_ids=(),
    ignore_eos=False,
)
PROMPT = ValidPrompt(RequestId("r"), (1, 2), SAMPLING)


class Client:
    def __init__(self, wanted: int = 100) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._wanted = wanted

    def take(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        logprobs: Sequence[TokenLogprobs],
    ) -> bool:
        self.token_ids += token_ids
        self.finish_reason = finish_reason
        return len(self.token_ids) < self._wanted


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5))))
def test_copies_are_delivered_once(events: list[tuple[int, int]]) -> None:
    client = Client()
    progress = Progress(PROMPT, [client.take], deadline=0.0)
    for first, count in events:
        if first <= len(progress.samples[0].token_ids):
            progress.samples[0].accept(first, ANSWER[first : first + count])
    assert client.token_ids == progress.samples[0].token_ids == ANSWER[: len(client.token_ids)]


def test_a_gap_and_a_contradiction_reopen() -> None:
    progress = Progress(PROMPT, [Client().take], deadline=0.0)
    progress.samples[0].accept(0, [5, 6])
    with pytest.raises(Reopen):
        progress.samples[0].accept(3, [8])
    with pytest.raises(Reopen):
        progress.samples[0].accept(1, [9, 9])
    assert progress.samples[0].token_ids == [5, 6]


def test_the_end_is_told_once() -> None:
    client = Client()
    progress = Progress(PROMPT, [client.take], deadline=0.0)
    progress.samples[0].accept(0, [5], FinishReason.STOP)
    progress.samples[0].accept(1, [6])
    assert progress.is_finished
    assert (client.token_ids, client.finish_reason) == ([5], FinishReason.STOP)


def test_a_client_that_wants_no_more_ends_it() -> None:
    client = Client(wanted=2)
    progress = Progress(PROMPT, [client.take], deadline=0.0)
    progress.samples[0].accept(0, [5, 6])
    assert progress.is_finished


def test_the_largest_hit_counts() -> None:
    told: list[int] = []
    progress = Progress(PROMPT, [Client().take], deadline=0.0, note_cached=told.append)
    for num_tokens in (0, 32, 16, 0, 48):
        progress.note_cached(num_tokens)
    assert told == [32, 48]
