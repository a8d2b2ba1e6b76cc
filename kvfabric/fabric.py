"""Fabric: what a service sees. A thread with an event loop of its own, and a `Node` on it.

All methods may be called from any thread and none of them waits for the network, but for `start`
and `close`. Sources and sinks are called on the fabric's loop.

1. `start` listens; from then on `address` is what a ticket says.
2. Receiving: `expect` a ticket before it is given away; the sink hears of the end, or `forget`.
3. Sending: `ship` a ticket, then `extend` and `commit` the `Shipment` it returns.
4. `close` fails what is left and gives everything back. UCX serves one fabric per process.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvfabric.config import FabricConfig
from kvfabric.errors import DeadlineExceeded, FabricClosed
from kvfabric.frame import TransferId
from kvfabric.node import Node, check_framable
from kvfabric.outgoing import Outgoing
from kvfabric.pace import Pace
from kvfabric.shipment import Shipment, Shipments
from kvfabric.stats import FabricStats, LentSlot
from kvfabric.ticket import BlockLender, FrameSink, FrameSource, KVShape, KVShard, Ticket

START_SECONDS = 30.0
CLOSE_SECONDS = 5.0

T = TypeVar("T")


class Fabric:
    """`staging` is `config.staging_nbytes` of memory, pinned where that matters; the fabric's own
    from `start` until `close` has returned. `pace`: of receiving; None: as fast as it comes."""

    def __init__(self, config: FabricConfig, staging: memoryview, pace: Pace | None = None) -> None:
        self.config = config
        self._pace = pace
        self._staging = staging
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvfabric", daemon=True)
        self._opened: concurrent.futures.Future[Node] = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._closed = False

    @property
    def address(self) -> str:
        """As peers reach it; known once started."""
        return self._node.address

    @property
    def is_paced(self) -> bool:
        """Whether it receives slower than it could, just now."""
        return self._pace is not None and self._pace.is_on

    def start(self) -> None:
        """Raises `FabricError` if it cannot listen."""
        self._thread.start()
        self._opened.result(timeout=START_SECONDS)

    def close(self) -> None:
        """Blocks until everything is given back, at most some seconds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._thread.ident:
            self._loop.close()
            return
        if self._opened.exception(timeout=START_SECONDS) is None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=3 * CLOSE_SECONDS)
        if self._thread.is_alive():
            raise DeadlineExceeded("the fabric's thread did not end")

    def shards(self, shape: KVShape) -> tuple[KVShard, ...]:
        """Where KV of that shape comes to: what a ticket of this receiver says."""
        generation = self.config.generation
        return (KVShard(self.address, generation, shape.first_head, shape.num_heads),)

    def expect(
        self, ticket: Ticket, shape: KVShape, sink: FrameSink, lender: BlockLender | None = None
    ) -> concurrent.futures.Future[None]:
        """Frames of this transfer are welcome, once the future is done. Raises `ValueError` for KV
        that no slot can hold. `lender`: for the other ranks, where there are any."""
        check_framable(shape, self.config)
        self._call(self._node.expect, ticket, shape, sink)
        welcome: concurrent.futures.Future[None] = concurrent.futures.Future()
        welcome.set_result(None)  # frames are taken by the loop too: behind what was just asked
        return welcome

    def forget(self, transfer_id: TransferId) -> None:
        """The sink gets nothing more; late frames are answered with ABORT. Idempotent. A call
        to the sink may be under way on the fabric's loop while this returns."""
        if not self._closed:
            self._call(self._node.forget, transfer_id)

    def give_up(self, transfer_id: TransferId) -> None:
        """Its sender has failed, says somebody who knows: the sink hears `lost` with what is
        installed, unless the transfer has ended. The sender, if it lives, gets ABORT."""
        if not self._closed:
            self._call(self._node.give_up, transfer_id)

    def ship(
        self,
        ticket: Ticket,
        shape: KVShape,
        source: FrameSource,
        lender: BlockLender | None = None,
    ) -> Shipment:
        """Starts connecting at once, to each of the ticket's shards that wants heads of `shape`.
        What goes wrong comes through `Shipment.done`. `lender` as for `expect`."""
        check_framable(shape, self.config)
        parts = self._outgoings(ticket, shape, source)
        shipment = parts[0] if len(parts) == 1 else Shipments(parts)
        for part in parts:
            self._call(self._node.ship, part)
        return shipment

    def stats(self) -> FabricStats:
        return self._node.stats()

    def rank_stats(self) -> list[FabricStats]:
        """Of each of the worker's ranks; `stats` is their sum."""
        return [self.stats()]

    def lent(self) -> concurrent.futures.Future[list[LentSlot]]:
        """Whose the staging slots are. Raises FabricClosed."""
        if self._closed:
            raise FabricClosed("the fabric is closed")
        return self.call(self._lent())

    def lent_here(self) -> list[LentSlot]:
        """The same of this process alone, for who is on the fabric's loop."""
        return self._node.lent()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs a coroutine on the fabric's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def _node(self) -> Node:
        assert self._opened.done(), "start() comes first"
        return self._opened.result()

    def _outgoings(self, ticket: Ticket, shape: KVShape, source: FrameSource) -> list[Outgoing]:
        peers = [peer for peer in ticket.shards if shape.shared_with(peer.heads).num_heads]
        return [self._node.outgoing(ticket, peer, shape, source) for peer in peers]

    def _call(self, function: Any, *args: object) -> None:
        if self._closed:
            raise FabricClosed("the fabric is closed")
        self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _lent(self) -> list[LentSlot]:
        return self.lent_here()

    async def _serve(self) -> None:
        opening = self._loop.create_task(self._open())
        await asyncio.wait((opening,))
        if (error := opening.exception()) is not None:
            self._opened.set_exception(error)
            return
        self._opened.set_result(opening.result())
        await self._stop.wait()
        await self._shut(opening.result())

    async def _shut(self, node: Node) -> None:
        await node.close(CLOSE_SECONDS)

    async def _open(self) -> Node:
        node = Node(self.config, self._staging, self._pace)
        await node.open()
        return node
