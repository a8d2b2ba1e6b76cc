"""What a slow reader finds: one event of tokens a sample, however many steps there were."""

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
