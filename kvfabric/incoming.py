"""The transfers this process expects, and what has become of each.

1. `expect` opens one: from now on its frames are welcome, for a while.
2. A connection's first frame binds it to the heads that the frame names; the ticket is used up for
   those.
3. Each further sign of life (a frame here, a frame installed) starts the inactivity clock anew.
4. It ends once: `committed` when everything is installed, `lost` on the first thing wrong, or
   silently by `forget`. Its frames are unknown from then on.

Belongs to the fabric's loop. Knows no slots and no wire.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

from kvfabric.control import AbortReason
from kvfabric.deadline import Alarm
from kvfabric.errors import BadFrame, DeadlineExceeded, FabricError, TransferAborted
from kvfabric.frame import FrameHeader, TransferId
from kvfabric.ticket import NOTHING, FrameSink, KVShape, ReceiveReport, Span, Ticket, around
from kvfabric.transfer import Transfer
from kvfabric.transfer_part import Part

OnLost = Callable[[TransferId, AbortReason], None]
"""How a bound connection hears that a transfer was lost here: it tells the sender."""


@dataclass(slots=True, eq=False)
class Incoming:
    """One expected transfer."""

    transfer_id: TransferId
    transfer: Transfer
    sink: FrameSink
    owner: str
    """As the ticket says."""
    on_lost: dict[Hashable, OnLost] = field(default_factory=dict)
    """By connection: who sends it, and is still there."""
    commit: bytes | None = None
    """Payload of the COMMIT for the first of our heads; the others carry none that counts."""
    install_ns: int = 0
    install: Span = NOTHING
    first_frame_ns: int = 0
    alive: bool = True
    alarm: Alarm | None = field(default=None, repr=False)
    awaited: tuple[float, str] = 0.0, ""
    """For how many seconds, and what, before the alarm rings."""

    def installed(self, frame: Span) -> None:
        """A frame, in that time."""
        self.install_ns += frame.end_ns - frame.begin_ns
        self.install = around((self.install, frame))


class IncomingTransfers:
    """All of them, by id."""

    def __init__(
        self,
        *,
        first_frame_timeout_s: float,
        transfer_timeout_s: float,
        count_error: Callable[[FabricError], None],
    ) -> None:
        self._first_frame_timeout_s = first_frame_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._count_error = count_error
        self._by_id: dict[TransferId, Incoming] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def expect(self, ticket: Ticket, shape: KVShape, sink: FrameSink) -> None:
        assert ticket.transfer_id not in self._by_id, "a ticket is minted once"
        transfer = Transfer(ticket.first_token, ticket.num_tokens, shape, ticket.codecs)
        incoming = Incoming(ticket.transfer_id, transfer, sink, ticket.owner)
        self._by_id[ticket.transfer_id] = incoming
        self._await(incoming, self._first_frame_timeout_s, "the first frame")

    def forget(self, transfer_id: TransferId) -> None:
        incoming = self._by_id.get(transfer_id)
        if incoming is not None:
            self._remove(incoming)

    def give_up(self, transfer_id: TransferId) -> None:
        """Its sender is known to have failed: lost, with what has been installed."""
        incoming = self._by_id.get(transfer_id)
        if incoming is not None:
            self.lose(incoming, TransferAborted("given up here"))

    def claim(
        self, header: FrameHeader, connection: Hashable, on_lost: OnLost
    ) -> tuple[Incoming, Part] | AbortReason:
        """The transfer of this frame, and the part of it that is bound to this connection; or why
        the frame is not wanted."""
        incoming = self._by_id.get(header.transfer_id)
        if incoming is None:
            return AbortReason.UNKNOWN
        try:
            part = incoming.transfer.part(connection, header.range.heads)
        except BadFrame as error:
            incoming.on_lost.pop(connection, None)  # told by our answer
            self.lose(incoming, error)
            return AbortReason.LOST
        if part is None:
            return AbortReason.TAKEN
        incoming.first_frame_ns = incoming.first_frame_ns or time.monotonic_ns()
        incoming.on_lost[connection] = on_lost
        self.touch(incoming)
        return incoming, part

    def touch(self, incoming: Incoming) -> None:
        """A sign of life."""
        if incoming.alive:
            self._await(incoming, self._transfer_timeout_s, "the next frame")

    def committed_if_complete(self, incoming: Incoming) -> bool:
        """Whether it is, now."""
        if not (incoming.alive and incoming.transfer.complete):
            return False
        assert incoming.commit is not None
        self._remove(incoming)
        report = ReceiveReport(
            install_ns=incoming.install_ns,
            receive_ns=time.monotonic_ns() - incoming.first_frame_ns,
            nbytes=incoming.transfer.nbytes,
            frames=incoming.transfer.num_accepted,
            install=incoming.install,
        )
        incoming.sink.committed(incoming.commit, report)
        return True

    def lose(self, incoming: Incoming, error: FabricError) -> None:
        """The first thing that goes wrong ends a transfer; what follows changes nothing. Whoever
        is sending it is told."""
        if not incoming.alive:
            return
        self._remove(incoming)
        self._count_error(error)
        for on_lost in incoming.on_lost.values():
            on_lost(incoming.transfer_id, AbortReason.LOST)
        incoming.sink.lost(error, incoming.transfer.verified_tokens())

    def aborted_by_sender(
        self, transfer_id: TransferId, connection: Hashable, error: FabricError
    ) -> None:
        """Only the connections that send a transfer may end it, or any while nobody sends some of
        its heads."""
        incoming = self._by_id.get(transfer_id)
        if incoming is None:
            return
        if connection in incoming.on_lost or incoming.transfer.has_free_heads:
            incoming.on_lost.pop(connection, None)
            self.lose(incoming, error)

    def lose_connection(self, connection: Hashable, error: FabricError) -> None:
        """One of several connections is enough to lose a transfer, unless all is here that it was
        to send."""
        for incoming in tuple(self._by_id.values()):
            was_sending = incoming.on_lost.pop(connection, None) is not None
            if was_sending and not incoming.transfer.has_all_of(connection):
                self.lose(incoming, error)

    def close(self, error: FabricError) -> None:
        for incoming in tuple(self._by_id.values()):
            incoming.on_lost.clear()  # their connections are about to break
            self.lose(incoming, error)

    def _remove(self, incoming: Incoming) -> None:
        del self._by_id[incoming.transfer_id]
        incoming.alive = False
        if incoming.alarm is not None:
            incoming.alarm.cancel()

    def _await(self, incoming: Incoming, seconds: float, what: str) -> None:
        if incoming.alarm is None:
            incoming.alarm = Alarm(partial(self._late, incoming))
        incoming.awaited = seconds, what
        incoming.alarm.set(seconds)

    def _late(self, incoming: Incoming) -> None:
        seconds, what = incoming.awaited
        self.lose(incoming, DeadlineExceeded(f"{what} did not come in {seconds:g} s"))
