"""Workers of several ranks: the last chunk leaves by groups of layers."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from decode_server.handoff import Committed
from tests.deploy.ranks_rig import HALF, NUM_TOKENS, next_of, relay, report_of
from tests.relay import eventually


@pytest.mark.parametrize("is_late", [False, True])
async def test_layers_of_the_last_chunk_leave_as_they_are_told_of(
    tiny_llama: Path, is_late: bool
) -> None:
    """Every rank sends those of its heads while the others are not there; also where the blocks are
    lent only when all has been told."""
    async with relay(tiny_llama, 3, 2) as r:
        r.decode.claimed.set_result(r.there)
        if is_late:
            r.granted = Future()
        shipment = r.ship(r.handoff.begin(0))
        shipment.extend(r.compute(HALF))
        shipment.extend(r.compute(NUM_TOKENS), 1)
        if is_late:
            r.granted.set_result(r.here)
        kv = r.prefill.kv(r.blocks, NUM_TOKENS)

        def is_there(layers: slice) -> bool:
            there = r.decode.kv(r.there.block_table, NUM_TOKENS)
            return torch.equal(there[layers], kv[layers])

        await eventually(lambda: is_there(slice(1)))
        assert not is_there(slice(1, 2)), "nobody has told of it"
        shipment.extend(NUM_TOKENS, 2)
        shipment.commit(b"")
        await report_of(shipment)
        assert isinstance(await next_of(r.verdicts), Committed)
        assert is_there(slice(2))
        await r.assert_all_back()
