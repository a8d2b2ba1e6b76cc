"""The transfers this process expects, and what has become of each.

1. `expect` opens one: from now on its frames are welcome, for a while.
2. Its first frame binds it to the connection that sent it; the ticket is used up.
3. Each further sign of life (a frame here, a frame installed) starts the inactivity clock anew.
4. It ends once: `committed` when everything is installed, `lost` on the first thing wrong, or
   silently by `forget`. Its frames are unknown from then on.

Belongs to the fabric's loop. Knows no slots and no wire.
"""

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from kvfabric.control import AbortReason
from kvfabric.errors import DeadlineExceeded, FabricError, TransferAborted
from kvfabric.frame import TransferId
from kvfabric.ticket import FrameSink, KVShape, ReceiveReport, Ticket
from kvfabric.transfer import Transfer

OnLost = Callable[[TransferId, AbortReason], None]
"""How the bound connection hears that a transfer was lost here: it tells the sender."""


@dataclass(slots=True, eq=False)
class Incoming:
    """One expected transfer."""

    transfer_id: TransferId
    transfer: Transfer
    sink: FrameSink
    connection: Hashable | None = None
    """Who sends it; None until its first frame."""
    on_lost: OnLost | None = None
    commit: bytes | None = None
    install_ns: int = 0
    first_frame_ns: int = 0
    alive: bool = True
    deadline: asyncio.TimerHandle | None = field(default=None, repr=False)


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
        transfer = Transfer(ticket.first_token, ticket.num_tokens, shape)
        incoming = Incoming(ticket.transfer_id, transfer, sink)
        self._by_id[ticket.transfer_id] = incoming
        self._set_deadline(incoming, self._first_frame_timeout_s, "the first frame")

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
        self, transfer_id: TransferId, connection: Hashable, on_lost: OnLost
    ) -> Incoming | AbortReason:
        """The transfer, bound to this connection; or why its frames are not wanted."""
        incoming = self._by_id.get(transfer_id)
        if incoming is None:
            return AbortReason.UNKNOWN
        if incoming.connection is None:
            incoming.connection, incoming.on_lost = connection, on_lost
            incoming.first_frame_ns = time.monotonic_ns()
        elif incoming.connection != connection:
            return AbortReason.TAKEN
        self.touch(incoming)
        return incoming

    def touch(self, incoming: Incoming) -> None:
        """A sign of life."""
        if incoming.alive:
            self._set_deadline(incoming, self._transfer_timeout_s, "the next frame")

    def committed_if_complete(self, incoming: Incoming) -> None:
        if not (incoming.alive and incoming.transfer.complete):
            return
        assert incoming.commit is not None
        self._remove(incoming)
        report = ReceiveReport(
            install_ns=incoming.install_ns,
            receive_ns=time.monotonic_ns() - incoming.first_frame_ns,
            nbytes=incoming.transfer.nbytes,
            frames=incoming.transfer.num_accepted,
        )
        incoming.sink.committed(incoming.commit, report)

    def lose(self, incoming: Incoming, error: FabricError, *, tell_sender: bool = True) -> None:
        """The first thing that goes wrong ends a transfer; what follows changes nothing."""
        if not incoming.alive:
            return
        self._remove(incoming)
        self._count_error(error)
        if tell_sender and incoming.on_lost is not None:
            incoming.on_lost(incoming.transfer_id, AbortReason.LOST)
        incoming.sink.lost(error, incoming.transfer.verified_tokens())

    def aborted_by_sender(
        self, transfer_id: TransferId, connection: Hashable, error: FabricError
    ) -> None:
        """Only the connection that sends a transfer, or any while none does, may end it."""
        incoming = self._by_id.get(transfer_id)
        if incoming is not None and incoming.connection in (None, connection):
            self.lose(incoming, error, tell_sender=False)

    def lose_connection(self, connection: Hashable, error: FabricError) -> None:
        for incoming in tuple(self._by_id.values()):
            if incoming.connection == connection:
                self.lose(incoming, error, tell_sender=False)

    def close(self, error: FabricError) -> None:
        for incoming in tuple(self._by_id.values()):
            self.lose(incoming, error, tell_sender=False)

    def _remove(self, incoming: Incoming) -> None:
        del self._by_id[incoming.transfer_id]
        incoming.alive = False
        if incoming.deadline is not None:
            incoming.deadline.cancel()
            incoming.deadline = None

    def _set_deadline(self, incoming: Incoming, seconds: float, what: str) -> None:
        if incoming.deadline is not None:
            incoming.deadline.cancel()
        error = DeadlineExceeded(f"{what} did not come in {seconds:g} s")
        loop = asyncio.get_running_loop()
        incoming.deadline = loop.call_later(seconds, self.lose, incoming, error)
