"""Random loads: no leak, no double free, everything accepted ends once, the oldest progresses."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest, QueueFull, RequestTooLong
from engine.prefill_order import PrefillPolicy
from engine.request import Leg
from engine.sequence import Sequence, Status
from tests.engine.known_cost import make_known
from tests.engine.requests import make_request
from tests.engine.scheduler_drive import Drive

MOVES = [
    "submit",
    "step",
    "step",
    "copy",
    "end_copy",
    "end_swap",
    "attach",
    "compute_rest",
    "abort",
    "release",
    "compile",
]


def submit_others(data: st.DataObject, leg: Leg, outputs: int) -> list[tuple[int, ...]]:
    """No other sample, or a few: with as many outputs each, or with fewer or none. A prefill leg
    that is given outputs samples nothing, so it knows no others then."""
    if data.draw(st.booleans()) or (leg is Leg.PREFILL and outputs):
        return []
    count = data.draw(st.integers(1, 3))
    return [tuple(range(data.draw(st.integers(0, outputs)))) for _ in range(count)]


def submit_any(drive: Drive, data: st.DataObject) -> None:
    leg = data.draw(st.sampled_from(Leg))
    max_tokens = data.draw(st.integers(1, 20))
    outputs = data.draw(st.integers(0, min(3, max_tokens - 1)))
    prompt_len, body = data.draw(st.integers(1, 30)), data.draw(st.integers(0, 2))
    request = make_request(
        name=str(drive.num_submitted),
        prompt=(*(100 * body + i for i in range(prompt_len - 1)), data.draw(st.integers(0, 1))),
        cache_salt=data.draw(st.sampled_from(("", "", "salt"))),
        max_tokens=max_tokens,
        leg=leg,
        outputs=tuple(range(outputs)),
        others=submit_others(data, leg, outputs),
        grammar=data.draw(st.sampled_from(("", "", "grammar"))),
    )
    try:
        drive.submit(request)
    except (RequestTooLong, InvalidRequest, QueueFull):
        assert request.request_id not in drive.seqs


def move(drive: Drive, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(MOVES))
    if kind == "submit":
        submit_any(drive, data)
    elif kind == "step":
        drive.step()
        if drive.last.seqs:  # a machine on which a token costs a millisecond
            drive.scheduler.cost.learn(drive.work, 0.001 * sum(drive.work[1::2]))
    elif kind == "end_swap":
        drive.end_swap(is_lost=data.draw(st.integers(0, 4)) == 0)
    elif kind == "end_copy":
        if drive.copies:
            drive.end_copy(data.draw(st.sampled_from(drive.copies)))
    elif drive.seqs:
        seq = data.draw(st.sampled_from(list(drive.seqs.values())))
        if kind == "copy" and seq.request.leg is not Leg.LOCAL:
            drive.start_copy(seq)
        elif kind == "attach" and seq.request.leg is Leg.DECODE:
            drive.attach(seq)
        elif kind == "compute_rest" and seq.request.leg is Leg.DECODE:
            drive.compute_rest(seq, data.draw(st.integers(0, seq.num_prompt_tokens)))
        elif kind == "compile":
            seq.awaits_grammar = False
        elif kind == "abort" or (kind == "release" and seq.status is Status.HELD):
            drive.abort(seq)


def drain(drive: Drive, policy: PrefillPolicy) -> None:
    """The world behaves: copies end, KV comes, grammars compile, prefill legs are released."""
    for seq in drive.seqs.values():
        seq.awaits_grammar = False
    for copy in drive.copies.copy():
        drive.end_copy(copy)
    is_swapping = False
    total = sum(seq.max_num_tokens for seq in drive.seqs.values())
    for _ in range(4 * total + 10 * len(drive.seqs) + 1):
        live = [seq for seq in drive.seqs.values() if seq.status is not Status.ENDED]
        if not live:
            return
        oldest, before, was_swapping = live[0], progress(live[0]), is_swapping
        may_wait = any(seq.is_prefill_leg and seq.block_table for seq in live)
        drive.step()
        # Blocks that are copied out are worth a step's wait, but not two.
        is_swapping = bool(drive.swaps)
        may_wait |= is_swapping and not was_swapping
        while drive.swaps:
            drive.end_swap()
        # Under srf shorter prompts pass; that all drain shows that it is not for ever.
        may_wait |= policy == "srf" and oldest.num_uncomputed_tokens > 1
        if oldest.status is Status.RUNNING and not may_wait:
            assert progress(oldest) > before, "the oldest is stuck"
        for seq in live:
            if seq.status is Status.AWAITING_KV and seq.awaits_transfer:
                drive.scheduler.claim(seq.request_id)
                drive.attach(seq)
            elif seq.status is Status.HELD:
                drive.abort(seq)
    raise AssertionError("the load does not drain")


def progress(seq: Sequence) -> tuple[int, int]:
    return seq.num_tokens, seq.num_computed_tokens


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_loads(data: st.DataObject) -> None:
    policy: PrefillPolicy = data.draw(st.sampled_from(("fcfs", "srf")))
    drive = Drive.build(
        num_blocks=data.draw(st.integers(1, 14)),
        block_size=data.draw(st.sampled_from((1, 3, 4))),
        token_budget=data.draw(st.integers(1, 20)),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_model_len=data.draw(st.integers(8, 60)),
        prefix_caching=data.draw(st.booleans()),
        tpot_slo_s=data.draw(st.sampled_from((None, 0.001, 0.02))),
        prefill_policy=policy,
        max_queue_s=data.draw(st.sampled_from((None, 0.02))),
        swap_tokens=data.draw(st.sampled_from((0, 12, 1000))),
    )
    if data.draw(st.booleans()):
        make_known(drive.scheduler.cost, [0.01, 0.001, 0.0, 0.001, 0.0])
    for _ in range(data.draw(st.integers(0, 80))):
        move(drive, data)
    drain(drive, policy)
    assert drive.ended.keys() == drive.seqs.keys()
    drive.check_empty()
