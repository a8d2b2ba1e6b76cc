"""Records are bounded: in number, in legs, in candidates, in bytes; and know why things ended."""

import asyncio
import gc
import tracemalloc

import pytest

from protos import serving_pb2 as pb
from router.errors import BadRequest, LegFailed, QueueFull, Reopen
from router.leg_record import MAX_CANDIDATES, MAX_CHUNKS, Judgement, LegRecord
from router.policy import Verdict
from router.record import MAX_ATTEMPTS, MAX_LEGS, Records, RequestRecord
from router.request import RequestId, SamplingParams, ValidPrompt, ValidRequest
from router.workers import PrefillWorker

SAMPLING = SamplingParams(
    max_tokens=1, temperature=0, top_k=0, top_p=1, seed=0, stop_token_ids=(), ignore_eos=False
)


@pytest.fixture
async def worker() -> PrefillWorker:
    return PrefillWorker("127.0.0.1:1")


def validated(record: RequestRecord, num_prompts: int = 1) -> RequestRecord:
    prompts = tuple(
        ValidPrompt(RequestId(f"{record.request_id}-{index}"), (1, 2), SAMPLING)
        for index in range(num_prompts)
    )
    record.read()
    record.validated(
        ValidRequest(record.request_id, prompts, (), is_streaming=False, has_usage_chunk=False),
        "tiny",
    )
    return record


async def fill(record: RequestRecord, worker: PrefillWorker, attempts: int, legs: int) -> None:
    """As badly as it can go."""
    seen = [Verdict(f"w-{index}", 1, 1, "more_loaded") for index in range(50)]
    verdicts = Judgement(len(seen), lambda: seen)
    for prompt in record.prompts:
        for _ in range(attempts):
            with prompt.attempting() as attempt:
                attempt.picked(verdicts, None)
                prompt.leg("decode", worker, verdicts)
                for _ in range(legs):
                    leg = prompt.leg("prefill", worker, verdicts)
                    timings = pb.Timings(codec="raw", transports=["tcp"] * 20)
                    for index in range(2 * MAX_CHUNKS):
                        timings.chunks.add(num_computed_tokens=index, begin_ns=1 << 60, end_ns=1)
                    leg.told(timings, worker)
                prompt.waited(0)


async def test_the_last_ones_are_kept() -> None:
    records = Records(3)
    for index in range(5):
        records.open(RequestId(f"r-{index}"), "/v1/completions")
    assert [record.request_id for record in records.newest_first()] == ["r-4", "r-3", "r-2"]
    assert records.get("r-1") is None
    assert not Records(0).open(RequestId("r"), "/").is_kept


async def test_one_request_has_an_end(worker: PrefillWorker) -> None:
    record = validated(RequestRecord(RequestId("r"), "/", is_kept=True), num_prompts=8)
    await fill(record, worker, attempts=2 * MAX_ATTEMPTS, legs=MAX_ATTEMPTS + 3)
    for prompt in record.prompts:
        assert prompt.num_attempts == 2 * MAX_ATTEMPTS
        assert len(prompt.attempts) == MAX_ATTEMPTS
        assert [a.number for a in prompt.attempts][-2:] == [MAX_ATTEMPTS - 1, 2 * MAX_ATTEMPTS]
        assert len(prompt.waits) == MAX_ATTEMPTS
        for attempt in prompt.attempts:
            assert len(attempt.prefills) + attempt.num_left_out == MAX_ATTEMPTS + 3
            assert len(attempt.candidates.verdicts) == MAX_CANDIDATES
            for leg in attempt.prefills:
                assert leg.timings is not None
                assert len(leg.timings.chunks) == MAX_CHUNKS
                assert len(leg.timings.transports) == 8
    num_legs = sum(len(a.prefills) for p in record.prompts for a in p.attempts)
    assert num_legs <= MAX_LEGS + 8 * MAX_ATTEMPTS  # the last leg of each attempt is always there


async def test_bytes_are_bounded_and_estimated_honestly(worker: PrefillWorker) -> None:
    limit = 4 << 20
    records = Records(1000, max_nbytes=limit)
    gc.collect()
    tracemalloc.start()
    try:
        for index in range(60):
            record = validated(records.open(RequestId(f"r-{index}"), "/v1/completions"))
            await fill(record, worker, attempts=4, legs=6)
            record.ended("completed")
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < len(records) < 60, "they would not all fit"
    assert records.get("r-59") is not None
    assert used < limit


async def fail_in(leg: LegRecord, error: BaseException) -> None:
    with leg.running():
        raise error


@pytest.mark.parametrize(
    ("error", "word", "detail"),
    [
        (LegFailed("w", "silent", "x" * 1000), "silent", "x" * 300),
        (QueueFull("w", 1.5), "queue_full", "retry after 1.5 s"),
        (Reopen("contradiction"), "contradiction", ""),
        (BadRequest("no"), "refused", "no"),
        (asyncio.CancelledError(), "cancelled", ""),
        (ValueError("a bug"), "ValueError", "a bug"),
    ],
)
async def test_why_an_attempt_ended(
    worker: PrefillWorker, error: BaseException, word: str, detail: str
) -> None:
    record = validated(RequestRecord(RequestId("r"), "/", is_kept=True))
    (prompt,) = record.prompts
    with pytest.raises(type(error)), prompt.attempting():
        await fail_in(prompt.leg("prefill", worker), error)
    (attempt,) = prompt.attempts
    (leg,) = attempt.prefills
    assert (attempt.outcome, attempt.detail) == (leg.outcome, leg.detail) == (word, detail)
    assert attempt.end_ns >= leg.end_ns > 0
