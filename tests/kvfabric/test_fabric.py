"""The facade: a thread of its own, called from any other."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvfabric.errors import FabricClosed, FabricError, TransferAborted
from kvfabric.fabric import Fabric
from kvfabric.ticket import KVShape, Ticket, new_transfer_id
from tests.kvfabric.rig import (
    BLOCK_SIZE,
    FINGERPRINT,
    SECONDS,
    SHAPE,
    Sink,
    Source,
    make_config,
    random_kv,
)


def open_fabric(generation: int, listen: str = "inproc://") -> Fabric:
    config = make_config(listen, generation)
    return Fabric(config, memoryview(bytearray(config.staging_nbytes)))


@pytest.fixture
def fabrics() -> Iterator[tuple[Fabric, Fabric]]:
    pair = open_fabric(1), open_fabric(2)
    for fabric in pair:
        fabric.start()
    yield pair
    for fabric in pair:
        fabric.close()
        fabric.close()
        stats = fabric.stats()
        assert (stats.send_slots_used, stats.recv_slots_used, stats.endpoints) == (0, 0, 0)
        assert (stats.expected_transfers, stats.outgoing_transfers) == (0, 0)
    assert not [t for t in threading.enumerate() if t.name == "kvfabric"]


def ticket_to(fabric: Fabric, num_tokens: int) -> Ticket:
    shards = fabric.shards(SHAPE)
    return Ticket(new_transfer_id(), shards, FINGERPRINT, 0, num_tokens, BLOCK_SIZE)


async def sink_on_loop(num_tokens: int) -> Sink:
    return Sink(num_tokens)


def test_transfers_from_many_threads(fabrics: tuple[Fabric, Fabric]) -> None:
    prefill, decode = fabrics

    def one(seed: int) -> None:
        ticket = ticket_to(decode, 320)
        sink = decode.call(sink_on_loop(320)).result(SECONDS)
        decode.expect(ticket, SHAPE, sink)
        outgoing = prefill.ship(ticket, SHAPE, Source(random_kv(320, seed)))
        for computed in range(0, 321, 40):
            outgoing.extend(computed)
        outgoing.commit(bytes([seed]))
        assert outgoing.done.result(SECONDS).nbytes == 320 * 1024
        commit, _ = decode.call(sink.commit()).result(SECONDS)
        assert commit == bytes([seed])
        assert sink.kv.tobytes() == random_kv(320, seed).tobytes()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one, range(12)))
    assert prefill.stats().sent_frames == decode.stats().received_frames >= 12 * 5
    assert prefill.stats().transports == ("inproc",)


def test_closing_fails_what_is_under_way(fabrics: tuple[Fabric, Fabric]) -> None:
    prefill, decode = fabrics
    ticket = ticket_to(decode, 320)
    sink = decode.call(sink_on_loop(320)).result(SECONDS)
    decode.expect(ticket, SHAPE, sink)
    outgoing = prefill.ship(ticket, SHAPE, Source(random_kv(320)))
    outgoing.extend(160)
    decode.call(sink.has_installed(1)).result(SECONDS)
    prefill.close()
    assert isinstance(outgoing.done.exception(SECONDS), FabricClosed)
    error, _ = decode.call(sink.loss()).result(SECONDS)
    assert isinstance(error, FabricError)
    outgoing.extend(320)
    outgoing.cancel()
    prefill.forget(ticket.transfer_id)
    with pytest.raises(FabricClosed):
        prefill.ship(ticket, SHAPE, Source(random_kv(320)))
    with pytest.raises(FabricClosed):
        prefill.expect(ticket, SHAPE, sink)


def test_waiting_on_done_cannot_cancel_it(fabrics: tuple[Fabric, Fabric]) -> None:
    prefill, decode = fabrics
    outgoing = prefill.ship(ticket_to(decode, 320), SHAPE, Source(random_kv(320)))

    async def give_up_waiting() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(outgoing.done), 0.01)

    asyncio.run(give_up_waiting())
    assert not outgoing.done.done()
    outgoing.cancel()
    assert isinstance(outgoing.done.exception(SECONDS), TransferAborted)


def test_kv_that_fits_no_slot_is_refused(fabrics: tuple[Fabric, Fabric]) -> None:
    huge = KVShape(num_layers=1, num_heads=1, head_nbytes=1 << 20)
    with pytest.raises(ValueError, match="exceeds"):
        fabrics[0].ship(ticket_to(fabrics[1], 1), huge, Source(random_kv(1)))


def test_a_fabric_that_cannot_listen_says_so() -> None:
    first, second = open_fabric(1, "inproc://taken"), open_fabric(2, "inproc://taken")
    first.start()
    with pytest.raises(FabricError, match="taken"):
        second.start()
    second.close()
    first.close()


def test_a_fabric_never_started_closes() -> None:
    open_fabric(1).close()
