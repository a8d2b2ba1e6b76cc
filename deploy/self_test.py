"""The fabric's self-test: what a child process of ours can ship to us, measured once at the start.

The child is a fabric like any peer on this host; it sends KV that means nothing, by one ticket,
through the same slots, checks and checksums as any transfer. So this is what a worker on the same
host would get: far less than memory allows says that UCX has fallen back to TCP, or worse. A link
to another host is measured by the transfers over it.

1. `run` expects a transfer and starts `python -m deploy.self_test`, with the ticket on its stdin.
2. The child connects and ships, and stays until its stdin is closed: a connection that breaks may
   overtake the last message on it. The outcome says how fast it was, and over what.
3. Under the floor, or without an end in time, there is a warning. The worker serves in any case.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass

from deploy.child import command
from kvfabric.config import FabricConfig
from kvfabric.errors import FabricError
from kvfabric.fabric import Fabric
from kvfabric.frame import FrameRange
from kvfabric.ticket import (
    KVShape,
    KVShard,
    Packed,
    ReceiveReport,
    Ticket,
    TransferId,
    new_transfer_id,
)
from runtime.log import get_logger

NUM_FRAMES = 24
"""Of the size of a slot; the first ones warm the connection up."""

TIMEOUT_S = 20.0

END_S = 5.0
"""For the child to end by itself."""

log = get_logger()


@dataclass(frozen=True, slots=True)
class Outcome:
    nbytes_per_s: float
    transports: tuple[str, ...]


class SelfTestFailed(Exception):
    """The child did not ship its frames; the text says why."""


async def run(fabric: Fabric, floor_nbytes_per_s: float) -> Outcome | None:
    """Logs what it finds; None if it found nothing. Never raises, but for a cancellation."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            outcome = await measure(fabric)
    except (TimeoutError, SelfTestFailed, FabricError, OSError) as error:
        log.warning("fabric self-test failed", error=str(error) or "it took too long")
        return None
    said = {
        "mb_per_s": round(outcome.nbytes_per_s / 1e6),
        "transports": ",".join(outcome.transports),
    }
    if outcome.nbytes_per_s < floor_nbytes_per_s:
        floor = round(floor_nbytes_per_s / 1e6)
        log.warning("the fabric is slower than its floor", floor_mb_per_s=floor, **said)
    else:
        log.info("fabric self-test", **said)
    return outcome


async def measure(fabric: Fabric) -> Outcome:
    """Raises SelfTestFailed, FabricError, OSError."""
    config = fabric.config
    ticket, shape = _ticket(fabric), _shape(config)
    sink = _Discard(fabric, asyncio.get_running_loop().create_future())
    fabric.expect(ticket, shape, sink)
    child = await asyncio.create_subprocess_exec(
        *command(sys.executable, "-m", "deploy.self_test"),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stderr is not None
    try:
        child.stdin.write(_order(ticket, config).encode() + b"\n")
        ended = asyncio.ensure_future(child.stderr.read())
        await asyncio.wait((ended, sink.ended), return_when=asyncio.FIRST_COMPLETED)
        if not sink.ended.done():
            raise SelfTestFailed((await ended).decode(errors="replace").strip()[-500:])
        return await sink.ended
    finally:
        fabric.forget(ticket.transfer_id)
        child.stdin.close()
        await _until_gone(child)


async def alone() -> Outcome:
    """Of this host, without a worker: `measure` over a fabric of its own. Raises as that does."""
    config = FabricConfig(
        listen="ucx://127.0.0.1:0", fingerprint=bytes(32), generation=1, send_slots=1
    )
    fabric = Fabric(config, memoryview(bytearray(config.staging_nbytes)))
    fabric.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await measure(fabric)
    finally:
        await asyncio.to_thread(fabric.close)


async def _until_gone(child: asyncio.subprocess.Process) -> None:
    """It ends by itself, if there is time; a worker that ends leaves no child behind."""
    worker_ends = (task := asyncio.current_task()) is not None and task.cancelling() > 0
    try:
        await asyncio.wait_for(child.wait(), 0 if worker_ends else END_S)
    except TimeoutError:
        child.kill()
    except asyncio.CancelledError:
        child.kill()
        await child.wait()
        raise
    await child.wait()


class _Discard:
    """A `FrameSink` that looks at the clock."""

    def __init__(self, fabric: Fabric, ended: asyncio.Future[Outcome]) -> None:
        self.ended = ended
        self._fabric = fabric
        self._nbytes = 0
        self._began_ns = 0

    async def install(self, frame: FrameRange, payload: memoryview, codec: int) -> None:
        if self._began_ns:
            self._nbytes += len(payload)
        else:
            self._began_ns = time.monotonic_ns()  # from the first frame's end on

    def committed(self, commit: bytes, report: ReceiveReport) -> None:
        seconds = (time.monotonic_ns() - self._began_ns) / 1e9
        self._settle(Outcome(self._nbytes / seconds, self._fabric.stats().transports))

    def lost(self, error: FabricError, num_tokens: int) -> None:
        self._settle(error)

    def _settle(self, outcome: Outcome | FabricError) -> None:
        self.ended.get_loop().call_soon_threadsafe(_set, self.ended, outcome)


def _set(future: asyncio.Future[Outcome], outcome: Outcome | FabricError) -> None:
    if future.done():
        return
    if isinstance(outcome, FabricError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _ticket(fabric: Fabric) -> Ticket:
    config = fabric.config
    return Ticket(
        transfer_id=new_transfer_id(),
        shards=(KVShard(fabric.address, config.generation, 0, 1),),
        fingerprint=config.fingerprint,
        first_token=0,
        num_tokens=NUM_FRAMES,
        block_size=1,
    )


def _shape(config: FabricConfig) -> KVShape:
    """A token fills a slot."""
    return KVShape(num_layers=1, num_heads=1, head_nbytes=config.slot_nbytes // 2)


def _order(ticket: Ticket, config: FabricConfig) -> str:
    ticket_fields = asdict(ticket) | {
        "transfer_id": ticket.transfer_id.hex(),
        "fingerprint": ticket.fingerprint.hex(),
    }
    return json.dumps({"ticket": ticket_fields, "slot_nbytes": config.slot_nbytes})


def _read_order(text: str) -> tuple[Ticket, int]:
    order = json.loads(text)
    fields = order["ticket"] | {
        "transfer_id": TransferId(bytes.fromhex(order["ticket"]["transfer_id"])),
        "fingerprint": bytes.fromhex(order["ticket"]["fingerprint"]),
        "shards": tuple(KVShard(**shard) for shard in order["ticket"]["shards"]),
    }
    return Ticket(**fields), order["slot_nbytes"]


class _Zeros:
    """A `FrameSource`: slots are zero already, or hold what was sent before."""

    async def pack(
        self, frame: FrameRange, out: memoryview, link_nbytes_per_s: float | None
    ) -> Packed:
        return Packed(len(out))


def main() -> None:
    """The child."""
    ticket, slot_nbytes = _read_order(sys.stdin.readline())
    config = FabricConfig(
        listen="ucx://127.0.0.1:0",
        fingerprint=ticket.fingerprint,
        generation=int.from_bytes(new_transfer_id()[:8], "little"),
        slot_nbytes=slot_nbytes,
        recv_slots=1,
    )
    fabric = Fabric(config, memoryview(bytearray(config.staging_nbytes)))
    fabric.start()
    try:
        outgoing = fabric.ship(ticket, _shape(config), _Zeros())
        outgoing.extend(ticket.num_tokens)
        outgoing.commit(b"")
        outgoing.done.result(TIMEOUT_S)
        sys.stdin.read()
    finally:
        fabric.close()


if __name__ == "__main__":
    main()
