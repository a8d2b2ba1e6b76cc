"""KV that two ranks swap, each its own heads: tokens as if nobody had given way, exactly."""

from concurrent.futures import Future

import pytest

from engine.kv_lease import KVLease
from engine.request import BlockId, RequestId
from engine.swap_space import SwapSpace
from engine.tp.messages import Swapped
from engine.tp.swapping import AllDone, RankSwaps
from tests.engine.conftest import TinyModel
from tests.engine.test_engine import MAX_TOKENS, SAMPLING, alone, requests_for, running

SMALL = {"block_size": 4, "num_blocks": 27, "swap_memory": 1 << 20, "num_ranks": 2}


@pytest.fixture(autouse=True)
def _always_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapSpace, "is_cheaper", lambda self, num_tokens: True)


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch) -> list[RankSwaps]:
    """Those of the other ranks."""
    made: list[RankSwaps] = []
    init = RankSwaps.__init__

    def remember(self: RankSwaps, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(RankSwaps, "__init__", remember)
    return made


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_swapped_is_undisturbed(
    tiny_llama: TinyModel, prefix_caching: bool, swaps: list[RankSwaps]
) -> None:
    requests = requests_for(SAMPLING[1])
    expected = alone(tiny_llama.folder, requests)
    with running(tiny_llama.folder, prefix_caching=prefix_caching, **SMALL) as rig:
        assert rig.run(*requests) == expected
        stats = rig.engine.stats()
        assert 0 < stats.tokens_swapped_in <= stats.tokens_swapped_out
        assert stats.swap_used_nbytes == 0
        if not prefix_caching:  # nothing was computed twice
            assert stats.output_tokens_computed == len(requests) * (MAX_TOKENS - 1)
    (rank,) = swaps
    assert not rank._payloads, "rank 0 drops what is wanted no more"


def test_what_one_rank_could_not_copy_is_computed_again(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell_of_failure(self: RankSwaps, serial: int, done: Future[int]) -> None:
        self._tell(Swapped(serial, -1))

    monkeypatch.setattr(RankSwaps, "_on_done", tell_of_failure)
    requests = requests_for({})
    expected = alone(tiny_llama.folder, requests)
    with running(tiny_llama.folder, **SMALL) as rig:
        assert rig.run(*requests) == expected
        stats = rig.engine.stats()
        assert stats.preemptions > 0
        assert stats.tokens_swapped_out == stats.swap_used_nbytes == 0


def test_blocks_are_kept_until_the_last_rank_is_done() -> None:
    drained: list[KVLease] = []
    lease = KVLease(RequestId("r"), [BlockId(3)], drained.append)
    lease.enter()
    assert not lease.close()
    all_done = AllDone(lease, 3)
    for ns in (5, 9):
        done: Future[int] = Future()
        done.set_result(ns)
        all_done.copied(done)
        assert not drained
        assert not all_done.future.done()
    last: Future[int] = Future()
    last.set_result(7)
    all_done.copied(last)
    assert drained == [lease]
    assert all_done.future.result(0) == 9
