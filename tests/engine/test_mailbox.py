"""What a slow reader finds: one event of tokens a sample, however many steps there were."""

import asyncio

from engine.async_engine import Mailbox
from engine.request import EngineEvent, FinishReason, PrefixHit, RequestId, TokensOut

R = RequestId("r")


def tokens(sample: int, index: int, reason: FinishReason | None = None) -> TokensOut:
    return TokensOut(R, index, (100 * sample + index,), reason, sample=sample)


async def drain(mailbox: Mailbox[EngineEvent]) -> list[EngineEvent]:
    events = []
    while (event := await mailbox.next(0.001)) is not None:
        events.append(event)
    return events


async def test_tokens_of_each_sample_coalesce() -> None:
    mailbox: Mailbox[EngineEvent] = Mailbox()
    for index in range(9):
        for sample in range(3):
            is_last = sample == 1 and index == 8
            mailbox.put(tokens(sample, index, FinishReason.STOP if is_last else None))
    events = await drain(mailbox)
    assert [event.sample for event in events if isinstance(event, TokensOut)] == [0, 1, 2]
    for sample, event in enumerate(events):
        assert isinstance(event, TokensOut)
        assert event.token_ids == tuple(range(100 * sample, 100 * sample + 9))
        assert (event.finish_reason is FinishReason.STOP) == (sample == 1)


async def test_tokens_pass_nothing_else() -> None:
    mailbox: Mailbox[EngineEvent] = Mailbox()
    hit = PrefixHit(R, 16, 0, 0)
    for event in (tokens(0, 0), hit, tokens(0, 1)):
        mailbox.put(event)
    assert await drain(mailbox) == [tokens(0, 0), hit, tokens(0, 1)]


async def test_silence_lasts_as_long_as_was_said() -> None:
    """Also where waits before it were short, and one timer looks after all of them."""
    mailbox: Mailbox[EngineEvent] = Mailbox()
    loop = asyncio.get_running_loop()
    for index in range(20):
        loop.call_later(0.004, mailbox.put, tokens(0, index))
        assert await mailbox.next(0.05) == tokens(0, index)
    for timeout_s in (0.05, 0.01, 0.03):
        began_s = loop.time()
        assert await mailbox.next(timeout_s) is None
        assert timeout_s <= loop.time() - began_s
    loop.call_later(0.01, mailbox.put, tokens(0, 20))
    assert await asyncio.wait_for(mailbox.next(60.0), 5.0) == tokens(0, 20)


async def test_a_reader_that_left_takes_nothing_with_it() -> None:
    mailbox: Mailbox[EngineEvent] = Mailbox()
    reading = asyncio.create_task(mailbox.next(60.0))
    await asyncio.sleep(0)
    reading.cancel()
    mailbox.put(tokens(0, 0))
    await asyncio.wait({reading})
    assert await mailbox.next(0.001) == tokens(0, 0)
