"""Node: a fabric on one event loop. Slots, listener, senders and receivers put together.

`Fabric` runs one in a thread of its own; everything here is called on its loop.
"""

import asyncio
import logging
from collections import deque

from kvfabric.checksum import Checksummer
from kvfabric.config import FabricConfig
from kvfabric.control import FINGERPRINT_NBYTES, Welcome
from kvfabric.errors import FabricClosed, FabricError, HandshakeRefused
from kvfabric.facts import difference
from kvfabric.faults import FaultPlan
from kvfabric.frame import TransferId
from kvfabric.frame_plan import max_frame_tokens
from kvfabric.incoming import IncomingTransfers
from kvfabric.outgoing import Outgoing
from kvfabric.pace import Pace
from kvfabric.receiver import Reception
from kvfabric.sender import Sender
from kvfabric.slots import cut_slab
from kvfabric.stats import FabricCounters, FabricStats, LentSlot
from kvfabric.tasks import TaskSet
from kvfabric.ticket import FrameSink, FrameSource, KVShape, KVShard, Ticket
from kvfabric.transport import Endpoint, Listener, open_transport, scheme_of

_logger = logging.getLogger(__name__)

_LAG_PERIOD_S = 0.25
_LAGS_KEPT = 60  # a quarter of a minute: whoever asks, and however often, sees the worst of it


class Node:
    """Made, opened and closed on the loop it serves."""

    def __init__(self, config: FabricConfig, staging: memoryview, pace: Pace | None = None) -> None:
        assert len(config.fingerprint) == FINGERPRINT_NBYTES
        self.config = config
        self.address = ""
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._counters = FabricCounters()
        self._checksummer = Checksummer()
        self._send_slots, self._recv_slots = cut_slab(
            staging,
            payload_nbytes=config.slot_nbytes,
            send_slots=config.send_slots,
            recv_slots=config.recv_slots,
        )
        self._recv_slots.on_shortage = self._recall
        self._incoming = IncomingTransfers(
            first_frame_timeout_s=config.first_frame_timeout_s,
            transfer_timeout_s=config.transfer_timeout_s,
            count_error=self._counters.count_error,
        )
        self._faults = FaultPlan.parse(config.faults) if config.faults else None
        self._transport = open_transport(config.listen, self._faults)
        self._sender = Sender(
            self._transport,
            fingerprint=config.fingerprint,
            generation=config.generation,
            facts=config.facts,
            slots=self._send_slots,
            counters=self._counters,
            connect_timeout_s=config.connect_timeout_s,
            send_timeout_s=config.send_timeout_s,
        )
        self._listener: Listener | None = None
        self._receptions: set[Reception] = set()
        self._runs = TaskSet()
        self._closed = False
        self._lags_s: deque[float] = deque([0.0], maxlen=_LAGS_KEPT)
        self._lag_timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        try:
            self._listener = await self._transport.listen(self.config.listen, self._on_endpoint)
        except FabricError:
            await self._transport.close()
            raise
        self.address = _advertised(self._listener.address, self.config.advertise_host)
        self._tick(asyncio.get_running_loop().time())

    async def close(self, seconds: float) -> None:
        """Fails every transfer, breaks every connection, waits until all slots are back.
        Again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        if self._lag_timer is not None:
            self._lag_timer.cancel()
        error = FabricClosed("the fabric is closed")
        self._incoming.close(error)
        for reception in tuple(self._receptions):
            reception.break_off(error)
        ended = await self._sender.close(error, seconds) and await self._runs.join(seconds)
        if not ended or self._send_slots.num_used or self._recv_slots.num_used:
            _logger.error("closed with slots in use; a pack or an install never returned")
        self._checksummer.close()
        await self._transport.close()

    def expect(self, ticket: Ticket, shape: KVShape, sink: FrameSink) -> None:
        if self._closed:
            sink.lost(FabricClosed("the fabric is closed"), ticket.first_token)
        else:
            self._incoming.expect(ticket, shape, sink)

    def forget(self, transfer_id: TransferId) -> None:
        self._incoming.forget(transfer_id)

    def give_up(self, transfer_id: TransferId) -> None:
        self._incoming.give_up(transfer_id)

    def outgoing(
        self, ticket: Ticket, peer: KVShard, shape: KVShape, source: FrameSource
    ) -> Outgoing:
        """A handle for `ship`, to one of the ticket's shards. Any thread may make one."""
        return Outgoing(
            self._loop,
            ticket,
            peer,
            shape,
            source,
            max_nbytes=self.config.slot_nbytes,
            checksummer=self._checksummer if self.config.checksum else None,
        )

    def ship(self, outgoing: Outgoing) -> None:
        if self._closed:
            outgoing.fail(FabricClosed("the fabric is closed"), tell_peer=False)
        elif outgoing.ticket.fingerprint != self.config.fingerprint:
            told = difference(self.config.facts, outgoing.ticket.facts)
            refusal = HandshakeRefused(f"the ticket is for KV of another meaning: {told}")
            outgoing.fail(refusal, tell_peer=False)
        elif scheme_of(outgoing.peer.address) != scheme_of(self.config.listen):
            error = FabricError(f"{outgoing.peer.address} is not of our transport")
            outgoing.fail(error, tell_peer=False)
        else:
            self._sender.ship(outgoing)

    def stats(self) -> FabricStats:
        """Any thread may call this: it reads single values, each whole in itself."""
        endpoints = [link.endpoint for link in self._sender.links]
        endpoints += [reception.endpoint for reception in tuple(self._receptions)]
        transports = {name for e in endpoints if e is not None for name in e.transports}
        return FabricStats(
            send_slots_used=self._send_slots.num_used,
            send_slots=self._send_slots.num_slots,
            recv_slots_used=self._recv_slots.num_used,
            recv_slots=self._recv_slots.num_slots,
            expected_transfers=len(self._incoming),
            outgoing_transfers=self._sender.num_transfers,
            endpoints=len(endpoints),
            transports=tuple(sorted(transports)),
            sent_nbytes=self._counters.sent_nbytes,
            sent_frames=self._counters.sent_frames,
            received_nbytes=self._counters.received_nbytes,
            received_frames=self._counters.received_frames,
            dropped_frames=self._counters.dropped_frames,
            errors=self._errors(),
            links_nbytes_per_s={
                link.address: speed
                for link in self._sender.links
                if (speed := link.speed.nbytes_per_s) is not None
            },
            injected_faults=dict(self._faults.injected) if self._faults is not None else {},
            ledger_violations=self._counters.ledger_violations,
            loop_lag_s=max(tuple(self._lags_s)),
        )

    def _errors(self) -> dict[str, int]:
        strangers = self._listener.num_turned_away if self._listener is not None else 0
        return {**self._counters.errors, **({"Stranger": strangers} if strangers else {})}

    def lent(self) -> list[LentSlot]:
        """Whose the slots are."""
        sending = [LentSlot("send", s.owner, s.since_ns) for s in self._send_slots.lent]
        return sending + [LentSlot("recv", s.owner, s.since_ns) for s in self._recv_slots.lent]

    def _on_endpoint(self, endpoint: Endpoint) -> None:
        if self._closed:
            endpoint.abort()
            return
        reception = Reception(
            endpoint,
            incoming=self._incoming,
            slots=self._recv_slots,
            checksummer=self._checksummer,
            counters=self._counters,
            offer_timeout_s=min(self.config.offer_timeout_s, self.config.transfer_timeout_s),
            install_timeout_s=self.config.transfer_timeout_s,
            pace=self._pace,
        )
        self._receptions.add(reception)
        self._runs.spawn(self._receive(reception))

    async def _receive(self, reception: Reception) -> None:
        welcome = Welcome(self.config.fingerprint, self.config.generation, self.config.facts)
        await reception.run(welcome, self.config.connect_timeout_s)
        self._receptions.discard(reception)

    def _recall(self) -> None:
        for reception in tuple(self._receptions):
            reception.recall()

    def _tick(self, due: float) -> None:
        loop = asyncio.get_running_loop()
        self._lags_s.append(loop.time() - due)
        self._audit()
        next_due = loop.time() + _LAG_PERIOD_S
        self._lag_timer = loop.call_at(next_due, self._tick, next_due)

    def _audit(self) -> None:
        if not (self._send_slots.is_balanced and self._recv_slots.is_balanced):
            self._counters.ledger_violations += 1
            _logger.error("the ledger of slots is wrong: one is lost, or lent twice")


def check_framable(shape: KVShape, config: FabricConfig) -> None:
    """Raises `ValueError` for KV of which not even one token of one layer fits a slot."""
    if not max_frame_tokens(shape, config.slot_nbytes):
        raise ValueError(f"{shape}: one token of one layer exceeds {config.slot_nbytes} bytes")


def _advertised(address: str, host: str | None) -> str:
    scheme, _, rest = address.partition("://")
    if host is None or scheme == "inproc":
        return address
    return f"{scheme}://{host}:{rest.rpartition(':')[2]}"
