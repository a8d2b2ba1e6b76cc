"""A transfer that several connections send, each its own heads."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.errors import BadFrame
from kvfabric.frame import NO_RANGE, FrameHeader, FrameKind, FrameRange, TransferId
from kvfabric.frame_plan import plan_frames
from kvfabric.ticket import KVShape
from kvfabric.transfer import Transfer
from kvfabric.transfer_part import Part, Verdict

SHAPE = KVShape(num_layers=2, num_heads=4, head_nbytes=4, first_head=3)  # heads [3, 7) of a model
FIRST, END = 4, 20
ID = TransferId(bytes(16))


def kv(sequence: int, frame: FrameRange) -> FrameHeader:
    return FrameHeader(FrameKind.KV, ID, sequence, frame, SHAPE.frame_nbytes(frame), None)


def commit(num_frames: int, heads: range) -> FrameHeader:
    named = FrameRange(0, 0, 0, 0, heads.start, len(heads))
    return FrameHeader(FrameKind.COMMIT, ID, num_frames, named, 0, None)


def part_of(transfer: Transfer, sender: str, heads: range) -> Part:
    part = transfer.part(sender, heads)
    assert part is not None
    return part


def frames_of(heads: range, max_tokens: int = 8) -> list[FrameRange]:
    shape = SHAPE.shared_with(heads)
    line = shape.frame_nbytes(FrameRange(0, 1, 0, 1, 0, shape.num_heads))
    return plan_frames(FIRST, END, shape=shape, block_size=4, max_nbytes=line * max_tokens)


@st.composite
def cuts(draw: st.DrawFn) -> list[range]:
    """The receiver's heads in one to three parts."""
    inner = draw(st.lists(st.integers(4, 6), max_size=2, unique=True).map(sorted))
    bounds = [3, *inner, 7]
    return [range(a, b) for a, b in pairwise(bounds)]


@given(cuts(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_parts_in_any_order_complete_exactly_at_the_last_install(
    parts: list[range], max_tokens: int, random: Random
) -> None:
    """What is verified is what all parts have, at every moment."""
    messages: list[FrameHeader] = []
    for heads in parts:
        frames = frames_of(heads, max_tokens)
        messages += [kv(i, frame) for i, frame in enumerate(frames)]
        messages.append(commit(len(frames), heads))
    random.shuffle(messages)
    transfer, grid = Transfer(FIRST, END, SHAPE), np.zeros((END, 2, 7), bool)
    for message in messages:
        assert not transfer.complete
        heads = next(h for h in parts if message.range.first_head in h)
        part = part_of(transfer, f"from {heads}", message.range.heads)
        if message.kind is FrameKind.COMMIT:
            assert part.commit(message) is Verdict.INSTALL
            continue
        assert part.accept(message) is Verdict.INSTALL
        part.installed(message.sequence)
        r = message.range
        grid[
            r.first_token : r.first_token + r.num_tokens,
            r.first_layer : r.first_layer + r.num_layers,
            r.first_head : r.first_head + r.num_heads,
        ] = True
        assert transfer.verified_tokens() == next(
            (token for token in range(FIRST, END) if not grid[token, :, 3:].all()), END
        )
    assert transfer.complete
    assert transfer.verified_tokens() == END
    assert not transfer.has_free_heads
    everything = FrameRange(FIRST, END - FIRST, 0, 2, 3, 4)
    assert transfer.nbytes == SHAPE.frame_nbytes(everything)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 8), st.integers(0, 5), st.booleans()),
        max_size=12,
    )
)
def test_no_head_is_ever_two_connections(
    claims: list[tuple[str, int, int, bool]],
) -> None:
    """Whatever is claimed by whom, of whatever heads: the parts stay disjoint and the receiver's,
    a stranger is turned away without harm, and COMMIT ends a part's growth."""
    transfer = Transfer(FIRST, END, SHAPE)
    owned: dict[str, range] = {}
    committed: set[str] = set()
    for sender, first, count, commits in claims:
        heads = range(first, first + count)
        before = dict(owned)
        try:
            part = transfer.part(sender, heads)
        except BadFrame:
            assert sender in owned or not owned, "a stranger who comes late disturbs nobody"
            continue
        if part is None:
            assert sender not in owned
            assert before == owned
            continue
        if sender in committed:
            assert part.heads == owned[sender]
        owned[sender] = part.heads
        if commits and sender not in committed and heads == part.heads:
            part.commit(commit(1, heads))
            committed.add(sender)
        named = [head for heads in owned.values() for head in heads]
        assert len(named) == len(set(named))
        assert set(named) <= set(SHAPE.heads)
        assert transfer.has_free_heads == (len(named) < SHAPE.num_heads)


def test_sequence_numbers_are_each_connection_s_own() -> None:
    transfer = Transfer(FIRST, END, SHAPE)
    for sender, heads in (("a", range(3, 5)), ("b", range(5, 7))):
        part = part_of(transfer, sender, heads)
        for sequence, frame in enumerate(frames_of(heads)):
            assert part.accept(kv(sequence, frame)) is Verdict.INSTALL
            assert part.accept(kv(sequence, frame)) is Verdict.DUPLICATE


def test_a_part_that_never_commits_leaves_the_transfer_open() -> None:
    transfer = Transfer(FIRST, END, SHAPE)
    for sender, heads in (("a", range(3, 5)), ("b", range(5, 7))):
        part = part_of(transfer, sender, heads)
        for sequence, frame in enumerate(frames_of(heads)):
            part.accept(kv(sequence, frame))
            part.installed(sequence)
    part_of(transfer, "a", range(3, 5)).commit(commit(len(frames_of(range(3, 5))), range(3, 5)))
    assert transfer.has_all_of("a")
    assert not transfer.has_all_of("b")
    assert not transfer.complete
    assert transfer.verified_tokens() == END


def test_one_part_is_not_the_whole() -> None:
    transfer = Transfer(END, END, SHAPE)
    part_of(transfer, "a", range(3, 5)).commit(commit(0, range(3, 5)))
    assert not transfer.complete
    assert transfer.has_free_heads
    part_of(transfer, "b", range(5, 7)).commit(commit(0, range(5, 7)))
    assert transfer.complete


def test_a_stranger_s_heads_are_turned_away() -> None:
    transfer = Transfer(FIRST, END, SHAPE)
    part_of(transfer, "a", range(3, 5))
    for heads in (range(3, 5), range(4, 6), range(2, 3), range(6, 8), range(6, 6), range(3, 7)):
        assert transfer.part("b", heads) is None, heads
    assert part_of(transfer, "b", range(5, 7)).heads == range(5, 7)


@pytest.mark.parametrize("heads", [range(0, 3), range(2, 4), range(6, 8), range(4, 4)])
def test_who_comes_first_with_heads_that_are_not_the_receiver_s(heads: range) -> None:
    with pytest.raises(BadFrame, match="heads"):
        Transfer(FIRST, END, SHAPE).part("a", heads)


def test_growing_into_another_s_heads_is_bad() -> None:
    transfer = Transfer(FIRST, END, SHAPE)
    part_of(transfer, "a", range(3, 4))
    part_of(transfer, "b", range(5, 6))
    assert part_of(transfer, "a", range(4, 5)).heads == range(3, 5)
    with pytest.raises(BadFrame, match="connection"):
        transfer.part("a", range(5, 6))
    with pytest.raises(BadFrame, match="connection"):
        transfer.part("b", range(7, 8))


def test_commit_names_all_heads_of_its_part_and_is_the_last_word() -> None:
    transfer = Transfer(FIRST, END, SHAPE)
    part = part_of(transfer, "a", range(3, 5))
    with pytest.raises(BadFrame, match=r"COMMIT of heads \[3, 4\)"):
        part.commit(commit(3, range(3, 4)))
    with pytest.raises(BadFrame, match="COMMIT of heads"):
        part.commit(FrameHeader(FrameKind.COMMIT, ID, 3, NO_RANGE, 0, None))
    assert part.commit(commit(3, range(3, 5))) is Verdict.INSTALL
    assert part.commit(commit(3, range(3, 5))) is Verdict.DUPLICATE
    with pytest.raises(BadFrame, match="earlier"):
        part.commit(commit(4, range(3, 5)))
    with pytest.raises(BadFrame, match="connection"):
        transfer.part("a", range(5, 6))


def test_a_commit_that_leaves_a_gap_in_its_own_heads_is_bad() -> None:
    transfer = Transfer(FIRST, END, SHAPE)
    frames = frames_of(range(3, 5))
    part = part_of(transfer, "a", range(3, 5))
    part.accept(kv(0, frames[0]))
    with pytest.raises(BadFrame, match="missing"):
        part.commit(commit(1, range(3, 5)))
