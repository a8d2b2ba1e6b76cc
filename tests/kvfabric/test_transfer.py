from dataclasses import replace
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.errors import BadFrame
from kvfabric.frame import NO_RANGE, FrameHeader, FrameKind, FrameRange, TransferId
from kvfabric.frame_plan import plan_frames
from kvfabric.ticket import KVShape
from kvfabric.transfer import Transfer
from kvfabric.transfer_part import Part, Verdict

SHAPE = KVShape(num_layers=3, num_heads=2, head_nbytes=4)
FIRST, END = 4, 24
ID = TransferId(bytes(16))

Grid = npt.NDArray[np.bool_]  # [tokens, layers, heads]


def header(sequence: int, frame: FrameRange) -> FrameHeader:
    return FrameHeader(FrameKind.KV, ID, sequence, frame, SHAPE.frame_nbytes(frame), None)


def commit(num_frames: int, heads: range = SHAPE.heads) -> FrameHeader:
    named = replace(NO_RANGE, first_head=heads.start, num_heads=len(heads))
    return FrameHeader(FrameKind.COMMIT, ID, num_frames, named, 0, None)


class OneSender:
    """A transfer and the only connection that sends it."""

    def __init__(self, first_token: int, num_tokens: int, shape: KVShape, name: str = "a") -> None:
        self.transfer = Transfer(first_token, num_tokens, shape)
        self.name = name

    def part(self, header: FrameHeader) -> Part:
        part = self.transfer.part(self.name, header.range.heads)
        assert part is not None
        return part

    def accept(self, header: FrameHeader) -> Verdict:
        return self.part(header).accept(header)

    def installed(self, header: FrameHeader) -> None:
        self.part(header).installed(header.sequence)

    def commit(self, num_frames: int) -> Verdict:
        return self.part(commit(num_frames)).commit(commit(num_frames))


def plan(max_tokens: int) -> list[FrameRange]:
    line = SHAPE.frame_nbytes(FrameRange(0, 1, 0, 1, 0, SHAPE.num_heads))
    return plan_frames(FIRST, END, shape=SHAPE, block_size=4, max_nbytes=line * max_tokens)


class NaiveTransfer:
    """The same judge, by painting cells."""

    def __init__(self) -> None:
        cells = (END, SHAPE.num_layers, SHAPE.num_heads)
        self.accepted = np.zeros(cells, bool)
        self.installed = np.zeros(cells, bool)

    def cells(self, grid: Grid, f: FrameRange) -> Grid:
        return grid[
            f.first_token : f.first_token + f.num_tokens,
            f.first_layer : f.first_layer + f.num_layers,
            f.first_head : f.first_head + f.num_heads,
        ]

    def accept(self, f: FrameRange) -> bool:
        inside = (
            min(f.num_tokens, f.num_layers, f.num_heads) > 0
            and f.first_token >= FIRST
            and f.first_token + f.num_tokens <= END
            and f.first_layer + f.num_layers <= SHAPE.num_layers
            and f.first_head + f.num_heads <= SHAPE.num_heads
        )
        cells = self.cells(self.accepted, f)
        if not inside or cells.any():
            return False
        cells[...] = True
        return True

    def install(self, f: FrameRange) -> None:
        self.cells(self.installed, f)[...] = True

    def verified_tokens(self) -> int:
        for token in range(FIRST, END):
            if not self.installed[token].all():
                return token
        return END


@given(st.integers(1, 60), st.randoms(use_true_random=False), st.data())
def test_any_order_completes_exactly_at_the_last_install(
    max_tokens: int, random: Random, data: st.DataObject
) -> None:
    frames = list(enumerate(plan(max_tokens)))
    random.shuffle(frames)
    commit_at = data.draw(st.integers(0, len(frames)))
    sender, naive = OneSender(FIRST, END, SHAPE), NaiveTransfer()
    transfer = sender.transfer
    for i, (sequence, frame) in enumerate(frames):
        if i == commit_at:
            assert sender.commit(len(frames)) is Verdict.INSTALL
        assert sender.accept(header(sequence, frame)) is Verdict.INSTALL
        assert not transfer.complete
        sender.installed(header(sequence, frame))
        naive.install(frame)
        assert transfer.verified_tokens() == naive.verified_tokens()
    if commit_at == len(frames):
        assert not transfer.complete
        sender.commit(len(frames))
    assert transfer.complete
    assert transfer.verified_tokens() == END
    assert transfer.nbytes == SHAPE.frame_nbytes(
        FrameRange(FIRST, END - FIRST, 0, SHAPE.num_layers, 0, SHAPE.num_heads)
    )


any_range = st.builds(
    FrameRange,
    st.integers(0, END + 2), st.integers(0, 10), st.integers(0, 3),
    st.integers(0, 4), st.integers(0, 2), st.integers(0, 3),
)  # fmt: skip


@given(st.lists(st.tuples(any_range, st.booleans()), max_size=25))
def test_hostile_ranges_are_judged_like_painting_cells(
    frames: list[tuple[FrameRange, bool]],
) -> None:
    sender, naive = OneSender(FIRST, END, SHAPE), NaiveTransfer()
    for sequence, (frame, installs) in enumerate(frames):
        wanted = naive.accept(frame)
        if wanted:
            sender.accept(header(sequence, frame))
            if installs:
                sender.installed(header(sequence, frame))
                naive.install(frame)
        else:
            with pytest.raises(BadFrame):
                sender.accept(header(sequence, frame))
    assert sender.transfer.verified_tokens() == naive.verified_tokens()


def test_the_same_frame_again_is_a_duplicate() -> None:
    sender = OneSender(FIRST, END, SHAPE)
    frame = header(0, plan(12)[0])
    sender.accept(frame)
    assert sender.accept(frame) is Verdict.DUPLICATE
    with pytest.raises(BadFrame, match="overlaps"):
        sender.accept(replace(frame, sequence=1))
    with pytest.raises(BadFrame, match="was"):
        sender.accept(replace(frame, range=plan(12)[1]))


def test_a_wrong_size_or_an_unknown_codec_is_bad() -> None:
    sender = OneSender(FIRST, END, SHAPE)
    frame = header(0, plan(12)[0])
    with pytest.raises(BadFrame, match="bytes"):
        sender.accept(replace(frame, nbytes=frame.nbytes - 1))
    with pytest.raises(BadFrame, match="codec"):
        sender.accept(replace(frame, codec=7))


def test_a_commit_that_leaves_a_gap_is_bad() -> None:
    sender = OneSender(FIRST, END, SHAPE)
    sender.accept(header(0, plan(12)[0]))
    with pytest.raises(BadFrame, match="missing"):
        sender.commit(1)


def test_a_commit_of_fewer_frames_than_came_is_bad() -> None:
    sender = OneSender(FIRST, END, SHAPE)
    for sequence, frame in enumerate(plan(12)):
        sender.accept(header(sequence, frame))
    with pytest.raises(BadFrame, match="COMMIT"):
        sender.commit(1)


def test_a_second_commit_is_a_duplicate_or_bad() -> None:
    sender = OneSender(FIRST, END, SHAPE)
    sender.commit(9)
    assert sender.commit(9) is Verdict.DUPLICATE
    with pytest.raises(BadFrame, match="earlier"):
        sender.commit(8)


def test_a_frame_behind_the_last_is_bad() -> None:
    sender = OneSender(FIRST, END, SHAPE)
    frames = plan(12)
    sender.commit(len(frames))
    for sequence, frame in enumerate(frames):
        sender.accept(header(sequence, frame))
    with pytest.raises(BadFrame, match="after all"):
        sender.accept(header(len(frames), frames[0]))


def test_nothing_to_send_completes_with_commit() -> None:
    sender = OneSender(END, END, SHAPE)
    assert not sender.transfer.complete
    sender.commit(0)
    assert sender.transfer.complete
    assert sender.transfer.verified_tokens() == END
