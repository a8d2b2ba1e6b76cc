"""Sender: the links to all peers, one for each peer process.

A link is made when a transfer is first shipped to its peer and kept while it works. A successor
of the peer on the same port has another generation, so it gets another link.
"""

from dataclasses import dataclass

from kvfabric.control import Hello
from kvfabric.errors import FabricClosed, FabricError
from kvfabric.link import Link
from kvfabric.outgoing import Outgoing
from kvfabric.slots import SlotPool
from kvfabric.stats import FabricCounters
from kvfabric.tasks import TaskSet
from kvfabric.ticket import KVShard
from kvfabric.transport import Transport


@dataclass(frozen=True, slots=True)
class _Peer:
    address: str
    generation: int


class Sender:
    def __init__(
        self,
        transport: Transport,
        *,
        fingerprint: bytes,
        generation: int,
        facts: str,
        slots: SlotPool,
        counters: FabricCounters,
        connect_timeout_s: float,
        send_timeout_s: float,
    ) -> None:
        self._transport = transport
        self._fingerprint = fingerprint
        self._generation = generation
        self._facts = facts
        self._slots = slots
        self._counters = counters
        self._connect_timeout_s = connect_timeout_s
        self._send_timeout_s = send_timeout_s
        self._links: dict[_Peer, Link] = {}
        self._runs = TaskSet()
        self.num_transfers = 0

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(self._links.values())

    def ship(self, outgoing: Outgoing) -> None:
        self.num_transfers += 1
        outgoing.done.add_done_callback(lambda _: self._ended(outgoing))
        self._link_for(outgoing.peer).add(outgoing)

    async def close(self, error: FabricClosed, seconds: float) -> bool:
        """Fails what is under way; False if a link would not end."""
        for link in self.links:
            link.break_off(error)
        return await self._runs.join(seconds)

    def _link_for(self, shard: KVShard) -> Link:
        peer = _Peer(shard.address, shard.generation)
        link = self._links.get(peer)
        if link is None or link.over:
            link = self._links[peer] = Link(
                peer.address,
                slots=self._slots,
                counters=self._counters,
                connect_timeout_s=self._connect_timeout_s,
                send_timeout_s=self._send_timeout_s,
            )
            self._runs.spawn(self._run(peer, link))
        return link

    async def _run(self, peer: _Peer, link: Link) -> None:
        hello = Hello(self._fingerprint, self._generation, peer.generation, facts=self._facts)
        await link.run(self._transport, hello)
        if self._links.get(peer) is link:
            del self._links[peer]

    def _ended(self, outgoing: Outgoing) -> None:
        """On the loop: only the loop ends a transfer."""
        self.num_transfers -= 1
        error = outgoing.done.exception()
        if isinstance(error, FabricError):
            self._counters.count_error(error)
