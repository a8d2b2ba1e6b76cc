"""What of an answer is written together, and that nothing is held back for longer than a moment."""

import asyncio

import h11

from router.joined_writes import JoinedWrites

HEAD = h11.Response(status_code=200, headers=[("transfer-encoding", "chunked")])


class Written:
    """A connection that has been asked something, and what was written to it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.conn = JoinedWrites(1000, loop, lambda: self.write(self.conn.take()))
        self.conn.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        while self.conn.next_event() is not h11.PAUSED and self.conn.their_state is not h11.DONE:
            pass
        self.writes: list[bytes] = []

    def write(self, output: bytes | None) -> None:
        if output:
            self.writes.append(output)

    def send(self, *events: h11.Event) -> None:
        for event in events:
            self.write(self.conn.send(event))


async def test_a_whole_answer_is_one_write() -> None:
    written = Written()
    written.send(HEAD, h11.Data(data=b"all"), h11.EndOfMessage())
    (answer,) = written.writes
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"3\r\nall\r\n0\r\n\r\n")
    await asyncio.sleep(0)
    assert len(written.writes) == 1


async def test_a_head_without_a_body_goes_out_as_soon_as_the_loop_goes_on() -> None:
    written = Written()
    written.send(HEAD)
    assert not written.writes
    await asyncio.sleep(0)
    written.send(h11.Data(data=b"a"))
    await asyncio.sleep(0)
    assert [write[:8] for write in written.writes] == [b"HTTP/1.1", b"1\r\na\r\n"[:8]]


async def test_who_writes_past_it_takes_what_it_holds_first() -> None:
    written = Written()
    written.send(HEAD)
    assert written.conn.take().startswith(b"HTTP/1.1 200")
    await asyncio.sleep(0)
    assert not written.writes


async def test_much_is_not_held() -> None:
    """Or nobody would hear that the client does not read."""
    written = Written()
    written.send(HEAD, *[h11.Data(data=b"x" * 10_000)] * 20)
    assert len(written.writes) == 2
    assert all(len(write) < 80_000 for write in written.writes)
