"""Transfers that fail: at their source, at their sink, by a deadline, by a refusal."""

import asyncio
from typing import Any

import numpy as np
import pytest

from kvfabric.errors import (
    DeadlineExceeded,
    FabricClosed,
    FabricError,
    HandshakeRefused,
    InstallFailed,
    PackFailed,
    PeerLost,
    TransferAborted,
)
from kvfabric.transport import Channel, Endpoint
from kvfabric.wire_window import ON_WIRE
from tests.kvfabric.rig import (
    SECONDS,
    Source,
    expected,
    idle,
    make_ticket,
    open_nodes,
    random_kv,
    ship_all,
    ship_error,
    shipped,
    start_ship,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("ucx_stays_up")]


@pytest.mark.parametrize("failure", [ValueError("no"), asyncio.CancelledError()])
async def test_a_source_that_fails_ends_its_transfer_only(failure: BaseException) -> None:
    async with open_nodes("inproc") as (prefill, decode):
        bad, good = expected(decode, 512), expected(decode, 512)
        source = Source(random_kv(512))
        source.failure = failure
        failing = ship_all(prefill, bad[0], source)
        fine = ship_all(prefill, good[0], Source(random_kv(512)))
        assert isinstance(await ship_error(failing), PackFailed)
        assert isinstance((await bad[1].loss())[0], TransferAborted)
        await shipped(fine)
        await good[1].commit()


async def test_a_bug_of_a_connection_ends_its_transfers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_nodes("inproc") as (prefill, decode):

        async def connect(address: str, seconds: float) -> None:
            raise ValueError("of a kind that nobody expects")

        monkeypatch.setattr(prefill._transport, "connect", connect)
        outgoing = start_ship(prefill, make_ticket(decode, 512), Source(random_kv(512)))
        assert "ValueError" in str(await ship_error(outgoing))
        await asyncio.sleep(0)
        assert "a task of the fabric failed" in caplog.text
        assert prefill.stats().endpoints == 0


@pytest.mark.parametrize("failure", [ValueError("no"), asyncio.CancelledError()])
async def test_a_sink_that_fails_ends_its_transfer_only(failure: BaseException) -> None:
    async with open_nodes("inproc") as (prefill, decode):
        bad, good = expected(decode, 1024), expected(decode, 512)
        bad[1].failure = failure
        failing = ship_all(prefill, bad[0], Source(random_kv(1024)))
        fine = ship_all(prefill, good[0], Source(random_kv(512)))
        error, num_tokens = await bad[1].loss()
        assert isinstance(error, InstallFailed)
        assert num_tokens == 0
        assert isinstance(await ship_error(failing), TransferAborted)
        await shipped(fine)
        await good[1].commit()


async def test_commit_before_all_is_computed_fails() -> None:
    async with open_nodes("inproc") as (prefill, decode):
        ticket, sink = expected(decode, 100)
        outgoing = start_ship(prefill, ticket, Source(random_kv(100)))
        outgoing.extend(40)
        outgoing.commit(b"")
        assert isinstance(await ship_error(outgoing), PackFailed)
        await sink.loss()


async def test_forget_in_mid_transfer_is_silent_and_late_frames_are_aborted(scheme: str) -> None:
    async with open_nodes(scheme) as (prefill, decode):
        ticket, sink = expected(decode, 1024)
        outgoing = start_ship(prefill, ticket, Source(random_kv(1024)))
        outgoing.extend(512)
        await sink.has_installed(1)
        decode.forget(ticket.transfer_id)
        decode.forget(ticket.transfer_id)
        outgoing.extend(1024)
        outgoing.commit(b"")
        assert isinstance(await ship_error(outgoing), TransferAborted)
        assert not sink.ended.done()


async def test_an_unknown_ticket_is_aborted() -> None:
    async with open_nodes("inproc") as (prefill, decode):
        outgoing = ship_all(prefill, make_ticket(decode, 2048), Source(random_kv(2048)))
        assert isinstance(await ship_error(outgoing), TransferAborted)
        assert decode.stats().dropped_frames > 0


async def test_a_ticket_is_good_for_one_transfer() -> None:
    async with open_nodes("inproc", count=3) as (prefill, other, decode):
        kv = random_kv(1024)
        ticket, sink = expected(decode, 1024)
        first = start_ship(prefill, ticket, Source(kv))
        first.extend(512)
        await sink.has_installed(1)
        for thief in (prefill, other):
            stolen = ship_all(thief, ticket, Source(random_kv(1024, seed=9)))
            assert isinstance(await ship_error(stolen), TransferAborted)
        first.extend(1024)
        first.commit(b"")
        await shipped(first)
        await sink.commit()
        assert np.array_equal(sink.kv, kv)
        late = ship_all(other, ticket, Source(kv))
        assert isinstance(await ship_error(late), TransferAborted)


@pytest.mark.parametrize("change", [{"generation": 99}, {"fingerprint": b"g" * 32}])
async def test_the_handshake_refuses(scheme: str, change: dict[str, Any]) -> None:
    changes: dict[str, Any] = {k: v for k, v in change.items() if k == "fingerprint"}
    async with (
        open_nodes(scheme, count=1) as (decode,),
        open_nodes(scheme, count=1, **changes) as (prefill,),
    ):
        ticket = make_ticket(decode, 64, **change)
        outgoing = ship_all(prefill, ticket, Source(random_kv(64)))
        assert isinstance(await ship_error(outgoing), HandshakeRefused)
        assert prefill.stats().errors == {"HandshakeRefused": 1}


async def test_first_frame_and_inactivity_deadlines() -> None:
    timeouts: dict[str, Any] = {"first_frame_timeout_s": 0.05, "transfer_timeout_s": 0.1}
    async with open_nodes("inproc", **timeouts) as (prefill, decode):
        _, never = expected(decode, 64)
        assert isinstance((await never.loss())[0], DeadlineExceeded)
        ticket, stalled = expected(decode, 256)
        outgoing = start_ship(prefill, ticket, Source(random_kv(256)))
        outgoing.extend(64)
        error, num_tokens = await stalled.loss()
        assert isinstance(error, DeadlineExceeded)
        assert num_tokens == 64
        assert isinstance(await ship_error(outgoing), TransferAborted)


async def test_a_peer_that_takes_nothing_meets_the_send_deadline() -> None:
    async with open_nodes("inproc", send_timeout_s=0.1) as (prefill, decode):
        ticket, sink = expected(decode, 1024)
        sink.gate.clear()
        outgoing = ship_all(prefill, ticket, Source(random_kv(1024)))
        assert isinstance(await ship_error(outgoing), DeadlineExceeded)
        assert isinstance((await sink.loss())[0], PeerLost)
        sink.gate.set()
        await idle(decode)
        ticket, sink = expected(decode, 1024)  # the broken link is replaced
        await shipped(ship_all(prefill, ticket, Source(random_kv(1024))))
        await sink.commit()


async def test_a_network_that_never_says_what_became_of_a_frame(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also not when the connection is broken: its frames' slots are given up, and no frame behind
    them waits for ever."""
    async with open_nodes("inproc", send_timeout_s=0.1, send_slots=8) as (prefill, decode):
        connect = prefill._transport.connect

        async def connect_badly(address: str, seconds: float) -> Endpoint:
            endpoint = await connect(address, seconds)
            send = endpoint.send

            def send_badly(channel: Channel, message: bytes | memoryview) -> asyncio.Future[None]:
                if channel is Channel.FRAMES:
                    return asyncio.get_running_loop().create_future()
                return send(channel, message)

            monkeypatch.setattr(endpoint, "send", send_badly)
            return endpoint

        monkeypatch.setattr(prefill._transport, "connect", connect_badly)
        ticket, _ = expected(decode, 1024)
        outgoing = ship_all(prefill, ticket, Source(random_kv(1024)))
        assert isinstance(await ship_error(outgoing), DeadlineExceeded)
        assert caplog.text.count("its slot is retired") == ON_WIRE
        assert prefill.stats().send_slots_used == ON_WIRE
        decode.forget(ticket.transfer_id)
        for slot in tuple(prefill._send_slots.lent):  # this network does not write to them
            prefill._send_slots.release(slot)


async def test_closing_ends_everything_at_both_ends(scheme: str) -> None:
    async with open_nodes(scheme, count=1) as (decode,):
        ticket, sink = expected(decode, 1024)
        async with open_nodes(scheme, count=1) as (prefill,):
            outgoing = start_ship(prefill, ticket, Source(random_kv(1024)))
            outgoing.extend(512)
            await sink.has_installed(1)
            await prefill.close(SECONDS)
            assert isinstance(await ship_error(outgoing), FabricClosed)
            assert isinstance((await sink.loss())[0], PeerLost)
            late = ship_all(prefill, ticket, Source(random_kv(64)))
            assert isinstance(await ship_error(late), FabricClosed)


async def test_another_scheme_is_refused() -> None:
    async with open_nodes("inproc", count=1) as (prefill,):
        ticket = make_ticket(prefill, 64, address="ucx://127.0.0.1:1")
        assert isinstance(
            await ship_error(ship_all(prefill, ticket, Source(random_kv(64)))), FabricError
        )
