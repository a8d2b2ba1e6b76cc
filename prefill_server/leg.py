"""One prefill leg: the life of a `Prefill` call.

1. The request goes to the engine's queue, or is refused there if it would wait too long. Once it is
   in, shipping starts, so that connecting overlaps computing.
2. A cached prefix, then each computed chunk, extends what may leave; of the last one each group of
   layers, while later ones are computed. The fabric packs it from the engine's blocks. What decode
   has cached itself is not in the ticket.
3. Token 0 of each sample goes to the router as soon as it is sampled, and into the COMMIT frame.
   If they end all samples there is nothing left to decode: the transfer is dropped.
4. When the last slot is free again `Shipped` tells the timings, and the leg holds nothing.

However the call ends, leaving `run` cancels the transfer and frees the blocks.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from engine.async_engine import AsyncEngine, Mailbox
from engine.errors import EngineError
from engine.kv_codec import Codec
from engine.kv_copier import KVCopier
from engine.kv_lease import KVLease
from engine.request import (
    ChunkComputed,
    EngineEvent,
    EngineRequest,
    FinishReason,
    LayersComputed,
    PrefixHit,
    PromptLogprobs,
    RequestFailed,
    TokensOut,
)
from kvfabric.errors import FabricError, TransferAborted
from kvfabric.fabric import Fabric
from kvfabric.frame import FrameRange
from kvfabric.shipment import Shipment
from kvfabric.ticket import KVShape, Packed, ShipReport, Ticket
from prefill_server.metrics import PrefillMetrics
from protos import serving_pb2 as pb

HEARTBEAT_S = 1.0

MAX_CHUNKS_TOLD = 128
"""In `Timings`: the last one stands for all from there on."""

FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True)
class ShipDone:
    """The transfer is over; nothing of it is under way any more."""

    outcome: ShipReport | FabricError


class LeaseSource:
    """A `FrameSource` that packs from an engine's blocks, and the lender of them to other ranks.
    Used on the fabric's loop."""

    def __init__(
        self, copier: KVCopier, lease: Future[KVLease], codecs: Sequence[int] = ()
    ) -> None:
        """`codecs`: of the ticket."""
        self._copier = copier
        self._lease = lease
        self._codecs = codecs

    async def pack(
        self, frame: FrameRange, out: memoryview, link_nbytes_per_s: float | None
    ) -> Packed:
        lease = await self._granted()
        packing = self._copier.pack(lease, frame, out, self._codecs, link_nbytes_per_s)
        return Packed(*await asyncio.wrap_future(packing))

    async def enter(self) -> Sequence[int]:
        try:
            lease = await self._granted()
            lease.enter()
        except EngineError as error:
            raise TransferAborted(str(error)) from error
        return lease.block_table

    def exit(self) -> None:
        self._lease.result().exit()

    async def _granted(self) -> KVLease:
        # Shielded: cancelling one frame's wait must not cancel the lease that all frames share.
        return await asyncio.shield(asyncio.wrap_future(self._lease))


class PrefillLeg:
    """See the module. `ticket` is None when nothing is to be shipped."""

    def __init__(
        self,
        engine: AsyncEngine,
        fabric: Fabric,
        metrics: PrefillMetrics,
        request: EngineRequest,
        ticket: Ticket | None,
    ) -> None:
        self._engine = engine
        self._fabric = fabric
        self._metrics = metrics
        self._request = request
        self._ticket = ticket
        self._samples = not request.output_token_ids
        self._mailbox: Mailbox[EngineEvent | ShipDone] = Mailbox()
        self._outgoing: Shipment | None = None
        self._timings = pb.Timings()
        self._num_cached_tokens = 0
        self._first_tokens: list[pb.FirstToken] = []
        self._is_over = False
        self._turns_seen = -1

    async def run(self, write: Callable[[pb.PrefillEvent], Awaitable[None]]) -> None:
        """Writes the events of the call. Raises EngineError (QueueFull before anything was begun)
        or FabricError."""
        name = self._request.request_id
        with self._engine.open(self._request, self._mailbox.put) as queued:
            # Asked for before the first step begins, which may be the last: no command is heard
            # in the midst of one.
            lease = None if self._ticket is None else self._engine.engine.lease(name)
            await asyncio.wrap_future(queued)
            try:
                if self._ticket is not None and lease is not None:
                    self._outgoing = self._ship(self._ticket, lease)
                while not self._is_over:
                    item = await self._mailbox.next(HEARTBEAT_S)
                    for event in self._react(item):
                        await write(event)
            finally:
                if self._outgoing is not None:
                    self._outgoing.cancel()
        await write(pb.PrefillEvent(shipped=pb.Shipped(timings=self._timings)))

    def _react(self, item: EngineEvent | ShipDone | None) -> list[pb.PrefillEvent]:
        match item:
            case None:
                return self._heartbeat()
            case PrefixHit():
                self._on_prefix_hit(item)
                return []
            case LayersComputed():
                if self._outgoing is not None:
                    self._outgoing.extend(item.num_computed_tokens, item.num_layers)
                return []
            case ChunkComputed():
                self._on_chunk(item)
                return []
            case PromptLogprobs():
                return [_prompt_logprobs(item)]
            case TokensOut():
                return [self._on_token(item)]
            case ShipDone():
                self._on_shipped(item.outcome)
                return []
            case RequestFailed():
                raise item.exception()
            case _:
                raise AssertionError(f"a prefill leg never hears {item}")

    def _heartbeat(self) -> list[pb.PrefillEvent]:
        """Only a loop that turns is alive: a hung engine falls silent although gRPC answers."""
        turns = self._engine.engine.stats().turns
        if turns == self._turns_seen:
            return []
        self._turns_seen = turns
        return [pb.PrefillEvent(heartbeat=pb.Heartbeat())]

    def _on_prefix_hit(self, hit: PrefixHit) -> None:
        self._num_cached_tokens = hit.num_cached_tokens
        if self._outgoing is not None:
            self._outgoing.extend(hit.num_cached_tokens)

    def _on_chunk(self, chunk: ChunkComputed) -> None:
        if self._outgoing is not None:
            self._outgoing.extend(chunk.num_computed_tokens)
        self._note_chunk(chunk)
        if not chunk.is_last:
            return
        timings, scheduled_ns = self._timings, chunk.at_ns - chunk.build_ns
        timings.queue_ns, timings.build_ns = chunk.queue_ns, chunk.build_ns
        timings.queue.begin_ns, timings.queue.end_ns = scheduled_ns - chunk.queue_ns, scheduled_ns
        timings.build.begin_ns, timings.build.end_ns = scheduled_ns, chunk.at_ns
        self._metrics.observe_built(chunk.queue_ns, chunk.build_ns)
        if not self._samples:
            self._commit(pb.Commit())

    def _note_chunk(self, chunk: ChunkComputed) -> None:
        chunks = self._timings.chunks
        if len(chunks) < MAX_CHUNKS_TOLD:
            chunks.add(begin_ns=chunk.begin_ns)
        chunks[-1].num_computed_tokens, chunks[-1].end_ns = chunk.num_computed_tokens, chunk.at_ns

    def _on_token(self, tokens: TokensOut) -> pb.PrefillEvent:
        (token_id,) = tokens.token_ids
        first = pb.FirstToken(
            sample=tokens.sample,
            token_id=token_id,
            finish_reason=FINISH_REASONS[tokens.finish_reason],
            num_cached_tokens=self._num_cached_tokens,
            timings=None if self._first_tokens else self._timings,
        )
        for entry in tokens.logprobs:
            first.logprobs.CopyFrom(pb.TokenLogprobs(**entry._asdict()))
        self._first_tokens.append(first)
        if len(self._first_tokens) == self._request.num_samples:
            if any(not one.finish_reason for one in self._first_tokens):
                self._commit(pb.Commit(first_tokens=self._first_tokens))
            else:
                self._is_over = True
        return pb.PrefillEvent(first_token=first)

    def _commit(self, commit: pb.Commit) -> None:
        if self._outgoing is None:
            self._is_over = True
        else:
            self._outgoing.commit(commit.SerializeToString())

    def _on_shipped(self, outcome: ShipReport | FabricError) -> None:
        if isinstance(outcome, FabricError):
            raise outcome
        timings = self._timings
        timings.pack_ns, timings.ship_ns = outcome.pack_ns, outcome.ship_ns
        timings.pack.begin_ns, timings.pack.end_ns = outcome.pack
        timings.ship.begin_ns, timings.ship.end_ns = outcome.ship
        timings.kv_nbytes, timings.kv_frames = outcome.nbytes, outcome.frames
        timings.transports.extend(outcome.transports)
        for rank, its in enumerate(outcome.ranks):
            told = timings.ranks.add(rank=rank, kv_nbytes=its.nbytes, kv_frames=its.frames)
            told.pack_ns, told.ship_ns = its.pack_ns, its.ship_ns
            told.pack.begin_ns, told.pack.end_ns = its.pack
            told.ship.begin_ns, told.ship.end_ns = its.ship
        timings.codec, timings.offers = Codec(outcome.codec).name.lower(), outcome.offers
        self._metrics.observe_shipped(outcome)
        self._is_over = True

    def _ship(self, ticket: Ticket, lease: Future[KVLease]) -> Shipment:
        engine = self._engine.engine
        source = LeaseSource(engine.copier, lease, ticket.codecs)
        ticket = replace(ticket, owner=self._request.request_id)
        outgoing = self._fabric.ship(ticket, KVShape(*engine.kv_shape), source, source)
        loop = asyncio.get_running_loop()

        def over(done: Future[ShipReport]) -> None:
            """On the fabric's thread."""
            loop.call_soon_threadsafe(self._mailbox.put, ShipDone(_outcome(done)))

        outgoing.done.add_done_callback(over)
        return outgoing


def _prompt_logprobs(told: PromptLogprobs) -> pb.PrefillEvent:
    entries = [pb.TokenLogprobs(**entry._asdict()) for entry in told.logprobs]
    message = pb.PromptLogprobs(first_index=told.first_index, logprobs=entries)
    return pb.PrefillEvent(prompt_logprobs=message)


def _outcome(done: Future[ShipReport]) -> ShipReport | FabricError:
    if done.cancelled():
        return TransferAborted("cancelled")
    error = done.exception()
    if error is None:
        return done.result()
    return error if isinstance(error, FabricError) else FabricError(repr(error))
