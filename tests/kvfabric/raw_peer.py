"""A peer that speaks the wire by hand, so that it can say what no peer of ours would."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count

from kvfabric.control import (
    CONTROL_NBYTES,
    Abort,
    Control,
    Hello,
    Offer,
    decode_control,
    encode_control,
)
from kvfabric.errors import BadFrame
from kvfabric.frame import (
    NO_RANGE,
    FrameHeader,
    FrameKind,
    FrameRange,
    message_nbytes,
    payload_checksum,
    payload_view,
    read_frame,
    write_frame,
)
from kvfabric.frame_plan import plan_frames
from kvfabric.handshake import greet
from kvfabric.node import Node
from kvfabric.ticket import Ticket
from kvfabric.transport import Channel, Endpoint, open_transport
from tests.kvfabric.rig import BLOCK_SIZE, FINGERPRINT, KV, SECONDS, SHAPE, SLOT_NBYTES, part


class RawSender:
    """Sends messages as they are told to be."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._numbers = count()

    async def offer(self, num_frames: int) -> None:
        await self.say(Offer(num_frames))

    async def say(self, message: Control) -> None:
        await self._within(self.endpoint.send(Channel.CONTROL, encode_control(message)))

    async def heard(self) -> Control:
        buffer = bytearray(CONTROL_NBYTES)
        await self._within(self.endpoint.recv(Channel.CONTROL, buffer))
        return decode_control(buffer)

    async def heard_abort(self) -> Abort:
        message = await self.heard()
        assert isinstance(message, Abort)
        return message

    async def send(self, message: memoryview) -> None:
        """With the next number of the connection, if it is a whole frame."""
        with suppress(BadFrame):
            write_frame(replace(read_frame(message), number=next(self._numbers)), message)
        await self._within(self.endpoint.send(Channel.FRAMES, message))

    async def offer_and_send(self, *messages: memoryview) -> None:
        await self.offer(len(messages))
        for message in messages:
            await self.send(message)

    async def broken(self) -> None:
        """Waits until the other side has broken the connection."""
        closed = self.endpoint.recv(Channel.CONTROL, bytearray(CONTROL_NBYTES))
        await asyncio.wait((closed,), timeout=SECONDS)
        assert closed.exception() is not None

    async def _within(self, posted: asyncio.Future[None]) -> None:
        await asyncio.wait((posted,), timeout=SECONDS)
        assert posted.done()
        posted.result()


@asynccontextmanager
async def raw_sender(scheme: str, node: Node, generation: int = 77) -> AsyncIterator[RawSender]:
    transport = open_transport(f"{scheme}://")
    endpoint = await transport.connect(node.address, SECONDS)
    try:
        await greet(endpoint, Hello(FINGERPRINT, generation, node.config.generation), SECONDS)
        yield RawSender(endpoint)
    finally:
        endpoint.abort()
        await transport.close()


def whole_plan(ticket: Ticket, heads: range = SHAPE.heads) -> list[FrameRange]:
    return plan_frames(
        ticket.first_token,
        ticket.num_tokens,
        shape=SHAPE.shared_with(heads),
        block_size=BLOCK_SIZE,
        max_nbytes=SLOT_NBYTES,
    )


def kv_message(ticket: Ticket, sequence: int, frame: FrameRange, kv: KV) -> memoryview:
    data = part(kv, frame).tobytes()
    message = memoryview(bytearray(message_nbytes(len(data))))
    payload_view(message, len(data))[:] = data
    header = FrameHeader(
        FrameKind.KV,
        ticket.transfer_id,
        sequence,
        frame,
        len(data),
        payload_checksum(message[64:-8]),
    )
    return write_frame(header, message)


def commit_message(
    ticket: Ticket, num_frames: int, payload: bytes = b"commit", heads: range = SHAPE.heads
) -> memoryview:
    message = memoryview(bytearray(message_nbytes(len(payload))))
    payload_view(message, len(payload))[:] = payload
    header = FrameHeader(
        FrameKind.COMMIT,
        ticket.transfer_id,
        num_frames,
        replace(NO_RANGE, first_head=heads.start, num_heads=len(heads)),
        len(payload),
        None,
    )
    return write_frame(header, message)


def whole_transfer(ticket: Ticket, kv: KV, heads: range = SHAPE.heads) -> list[memoryview]:
    """All that a sender of these heads has to send."""
    plan = whole_plan(ticket, heads)
    messages = [kv_message(ticket, i, frame, kv) for i, frame in enumerate(plan)]
    return [*messages, commit_message(ticket, len(plan), heads=heads)]
