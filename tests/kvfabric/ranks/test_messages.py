import pytest

from kvfabric.errors import ChecksumMismatch, FabricError, PeerLost
from kvfabric.frame import TransferId
from kvfabric.ranks.messages import (
    Blocks,
    Cancel,
    Claim,
    Commit,
    Counted,
    Expect,
    Expecting,
    Extend,
    Forget,
    GiveUp,
    Here,
    Lost,
    Message,
    NoBlocks,
    NotShipped,
    Received,
    Released,
    Ship,
    Shipped,
    decode,
    encode,
    error_of,
)
from kvfabric.stats import FabricStats, LentSlot, added_up
from kvfabric.ticket import KVShard, ReceiveReport, ShipReport, Span, Ticket

ID = TransferId(bytes(range(16)))
SHARD = KVShard("ucx://127.0.0.1:9", (1 << 64) - 1, 2, 1)
TICKET = Ticket(
    ID, (KVShard("inproc://a", 1, 0, 2), SHARD), b"f" * 32, 16, 99, 16, codecs=(2, 1), owner="r"
)
STATS = FabricStats(
    1, 8, 2, 8, 3, 4, 5, ("posix", "tcp"), 6, 7, 8, 9, 10, {"PeerLost": 2},
    {"ucx://127.0.0.1:9": 2.5e9}, {"kv:drop": 1}, 11, 0.25,
)  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        Here(SHARD, STATS),
        Counted(STATS, [LentSlot("recv", "request-1", 5), LentSlot("send", "", 6)]),
        Expect(TICKET),
        Expecting(ID),
        Forget(ID),
        GiveUp(ID),
        Claim(ID),
        Blocks(ID, [3, 1, 2]),
        NoBlocks(ID, "gone:\n“away”"),
        Received(ID, ReceiveReport(1, 2, 3, 4, Span(5, 6))),
        Lost(ID, 32, "PeerLost", "no\nmore"),
        Released(ID),
        Ship(7, TICKET, []),
        Extend(7, 64, 3, [4]),
        Extend(7, 64, None, []),
        Commit(7),
        Cancel(7),
        Shipped(7, ShipReport(1, 2, 3, 4, Span(5, 6), Span(7, 8), ("posix", "tcp"), 0, 9)),
        NotShipped(7, "PackFailed", ""),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_is_one_line_and_comes_back(message: Message) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_errors_keep_their_class_and_text() -> None:
    error = error_of("ChecksumMismatch", "not what was sent")
    assert type(error) is ChecksumMismatch
    assert str(error) == "not what was sent"
    assert type(error_of("PeerLost", "")) is PeerLost
    assert type(error_of("NeverHeardOf", "x")) is FabricError


def test_numbers_of_all_ranks_add_up() -> None:
    together = added_up([STATS, STATS])
    assert together.sent_nbytes == 2 * STATS.sent_nbytes
    assert together.errors == {"PeerLost": 4}
    assert together.transports == ("posix", "tcp")
    assert together.loop_lag_s == 0.25
    assert added_up([STATS]) == STATS
