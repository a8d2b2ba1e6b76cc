"""The receiving end of a request's handoff: tickets out, frames into blocks, one verdict back.

Used from two threads: the service's loop mints and drops tickets, the fabric's loop installs.

1. `mint` names a transfer and tells the fabric to expect it.
2. The first frame claims the blocks from the engine (a promise becomes ids, which cannot fail);
   every frame is scattered into them by the engine's copier, beside the step.
3. The fabric's verdict, `Committed` or `Lost`, is posted to the request's mailbox. After `Lost`
   the next ticket asks only for what is missing, into the same blocks.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from engine.engine import Engine
from engine.errors import EngineError
from engine.kv_codec import Codec
from engine.kv_lease import KVLease
from engine.request import RequestId
from kvfabric.errors import FabricError, TransferAborted
from kvfabric.fabric import Fabric
from kvfabric.frame import FrameRange
from kvfabric.ticket import KVShape, ReceiveReport, Ticket, TransferId, new_transfer_id

WELCOME_S = 2.0


@dataclass(frozen=True, slots=True)
class Committed:
    """All KV of a ticket is installed."""

    transfer_id: TransferId
    commit: bytes
    report: ReceiveReport
    at_ns: int
    """When, by time.monotonic_ns."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The rest of a ticket's KV will not come; [0, num_tokens) of the prompt is installed."""

    transfer_id: TransferId
    error: FabricError
    num_tokens: int


class Handoff:
    """See the module. One for each request that gets its KV by a transfer."""

    def __init__(
        self,
        engine: Engine,
        fabric: Fabric,
        request_id: RequestId,
        num_tokens: int,
        post: Callable[[Committed | Lost], None],
    ) -> None:
        self.ticket: Ticket | None = None
        """The one that is out, if any."""
        self._engine = engine
        self._fabric = fabric
        self._request_id = request_id
        self._num_tokens = num_tokens
        self._post = post
        self._blocks: _ClaimedBlocks | None = None
        self.welcome: Future[None] | None = None
        """Of the ticket that was minted last."""

    @property
    def installs(self) -> "Installs":
        """Since the last `begin`."""
        return self._blocks.installs if self._blocks is not None else Installs()

    def begin(self, first_token: int) -> Ticket:
        """Room is reserved: a ticket for the prompt from `first_token` on, into fresh blocks."""
        self.drop()
        self._blocks = _ClaimedBlocks(self._engine, self._request_id)
        return self._mint(first_token)

    def resume(self, num_installed: int) -> Ticket:
        """A ticket for what is missing. At least the last token comes again, as the prefill leg
        must run in any case for token 0."""
        block_size = self._engine.block_size
        self.ticket = None
        return self._mint(min(num_installed, self._num_tokens - 1) // block_size * block_size)

    def drop(self) -> None:
        """Nothing more of the present ticket is wanted; frames still coming are aborted."""
        if self.ticket is not None:
            self._fabric.forget(self.ticket.transfer_id)
            self.ticket = None

    async def welcomed(self) -> None:
        """Until the ticket that was minted last may be given away. A rank that does not answer is
        not waited for long: it will lose the transfer."""
        if self.welcome is not None and not self.welcome.done():
            await asyncio.wait((asyncio.wrap_future(self.welcome),), timeout=WELCOME_S)

    def is_out(self, transfer_id: bytes) -> bool:
        return self.ticket is not None and self.ticket.transfer_id == transfer_id

    def give_up(self, transfer_id: bytes) -> None:
        """Posts `Lost` for that ticket, with the prefix that is installed, if it is out."""
        if self.ticket is not None and self.is_out(transfer_id):
            self._fabric.give_up(self.ticket.transfer_id)

    def is_current(self, verdict: Committed | Lost) -> bool:
        return self.ticket is not None and self.ticket.transfer_id == verdict.transfer_id

    def _mint(self, first_token: int) -> Ticket:
        assert self.ticket is None, self.ticket
        assert self._blocks is not None, "begin comes first"
        shape = KVShape(*self._engine.kv_shape)
        self.ticket = Ticket(
            transfer_id=new_transfer_id(),
            shards=self._fabric.shards(shape),
            fingerprint=self._engine.fingerprint,
            facts=self._fabric.config.facts,
            first_token=first_token,
            num_tokens=self._num_tokens,
            block_size=self._engine.block_size,
            # Decoding costs more of a busy core than the bytes that it saves.
            codecs=() if self._fabric.is_paced else self._engine.kv_codecs,
            owner=self._request_id,
        )
        sink = _InstallSink(self._blocks, self.ticket.transfer_id, self._post)
        self.welcome = self._fabric.expect(self.ticket, shape, sink, self._blocks)
        return self.ticket


@dataclass(slots=True)
class Installs:
    """What scattering took; times by time.monotonic_ns."""

    ns: int = 0
    """Summed over the frames."""
    begin_ns: int = 0
    end_ns: int = 0


class _ClaimedBlocks:
    """The blocks of one reservation, claimed when the first frame comes, to this rank or another:
    it is the lender of those. Fabric's loop only."""

    def __init__(self, engine: Engine, request_id: RequestId) -> None:
        self.installs = Installs()
        self._engine = engine
        self._request_id = request_id
        self._claim: Future[KVLease] | None = None

    async def install(self, frame: FrameRange, payload: memoryview, codec: int) -> None:
        lease = await self._lease()
        scatter = self._engine.copier.scatter(lease, frame, payload, codec=Codec(codec))
        self.installs.ns += await asyncio.wrap_future(scatter)
        self.installs.end_ns = time.monotonic_ns()

    async def enter(self) -> Sequence[int]:
        try:
            lease = await self._lease()
            lease.enter()
        except EngineError as error:
            raise TransferAborted(str(error)) from error
        return lease.block_table

    def exit(self) -> None:
        assert self._claim is not None
        self._claim.result().exit()

    async def _lease(self) -> KVLease:
        if self._claim is None:
            self.installs.begin_ns = time.monotonic_ns()
            self._claim = self._engine.claim(self._request_id)
        if self._claim.done():  # no way through the loop for each frame
            return self._claim.result()
        # Shielded: one frame's cancelled wait must not cancel the claim that all frames share.
        return await asyncio.shield(asyncio.wrap_future(self._claim))


class _InstallSink:
    """The `FrameSink` of one ticket."""

    def __init__(
        self,
        blocks: _ClaimedBlocks,
        transfer_id: TransferId,
        post: Callable[[Committed | Lost], None],
    ) -> None:
        self._blocks = blocks
        self._transfer_id = transfer_id
        self._post = post

    async def install(self, frame: FrameRange, payload: memoryview, codec: int) -> None:
        await self._blocks.install(frame, payload, codec)

    def committed(self, commit: bytes, report: ReceiveReport) -> None:
        self._post(Committed(self._transfer_id, commit, report, time.monotonic_ns()))

    def lost(self, error: FabricError, num_tokens: int) -> None:
        self._post(Lost(self._transfer_id, error, num_tokens))
