"""What a worker says of its blocks and slots while a request runs, and afterwards."""

import random
from collections import Counter
from pathlib import Path

from deploy.worker_ledger import WorkerLedger
from protos import serving_pb2 as pb
from tests.relay import Worker, eventually, run_prefill, running_leg, started_worker

PROMPT = random.Random(3).choices(range(17, 49152), k=100)


async def told_by(worker: Worker) -> dict[tuple[str, str], pb.LedgerEntry]:
    """By owner and state; the blocks add up whenever one asks."""
    ledger = await WorkerLedger("w", worker.loop_side, worker.fabric, 7)(pb.ROLE_DECODE)
    assert (ledger.name, ledger.role, ledger.generation) == ("w", pb.ROLE_DECODE, 7)
    assert ledger.violations == 0
    counts: Counter[bool] = Counter()
    found = {}
    for one in ledger.entries:
        state = pb.LedgerState.Name(one.state).removeprefix("LEDGER_STATE_").lower()
        counts[state in ("sending", "receiving")] += one.count
        assert (one.owner, state) not in found
        found[one.owner, state] = one
    assert counts[False] == ledger.num_blocks == worker.engine.num_blocks
    assert counts[True] <= ledger.num_send_slots + ledger.num_recv_slots
    return found


async def test_blocks_have_the_request_for_their_owner(tiny_llama: Path) -> None:
    with started_worker(tiny_llama) as prefill, started_worker(tiny_llama) as decode:
        idle = {("", "free"), ("", "cached")}
        assert set(await told_by(decode)) == idle
        with running_leg(decode.decode_leg(PROMPT, 400)) as (events, task):
            await events.until(lambda: bool(events.tickets))
            promised = await told_by(decode)
            assert set(promised) == idle | {("request-0", "promised")}
            await run_prefill(prefill.prefill_leg(PROMPT, 400, events.tickets[0]))
            await events.until(lambda: len(events.token_ids) > 1)
            held = await told_by(decode)
            assert set(held) == idle | {("request-0", "held")}
            own = held["request-0", "held"]
            assert own.count >= len(PROMPT) // 16
            assert own.has_call
            assert 0 < own.age_ms < 60_000
            task.cancel()
        await eventually(lambda: decode.engine.stats().blocks.held == 0)
        assert set(await told_by(decode)) == idle
        assert set(await told_by(prefill)) == idle


async def test_an_owner_without_a_call_is_told(tiny_llama: Path) -> None:
    """A request that nobody waits for: what a leak of a call would look like."""
    with started_worker(tiny_llama) as worker:
        leg = worker.decode_leg(PROMPT, 5)
        worker.engine.submit(leg._request)
        await eventually(lambda: worker.engine.stats().awaiting_kv > 0)
        (own,) = (one for (owner, _), one in (await told_by(worker)).items() if owner)
        assert not own.has_call
        worker.engine.abort(leg._request.request_id)
        await eventually(lambda: worker.engine.stats().awaiting_kv == 0)


async def test_slots_have_an_owner_once_a_frame_has_come(tiny_llama: Path) -> None:
    with started_worker(tiny_llama) as worker:

        async def lend() -> None:
            node = worker.fabric._node
            for name in ("r-0/decode-1", "r-0/decode-1", ""):
                slot = await node._recv_slots.acquire(name)
                slot.owner = name

        async def give_back() -> None:
            for slot in tuple(worker.fabric._node._recv_slots.lent):
                worker.fabric._node._recv_slots.release(slot)

        worker.fabric.call(lend()).result(5)
        told = await told_by(worker)
        assert told["r-0", "receiving"].count == 2
        assert told["", "receiving"].count == 1
        worker.fabric.call(give_back()).result(5)
        assert ("", "receiving") not in await told_by(worker)
