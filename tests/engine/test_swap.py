"""In float32 tokens with swapping are those with recomputing and those undisturbed, exactly."""

import pytest

from engine.swap_space import SwapSpace
from tests.engine.conftest import TinyModel
from tests.engine.test_engine import MAX_TOKENS, SAMPLING, alone, requests_for, running

SMALL = {"block_size": 4, "num_blocks": 27}


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_swapped_is_recomputed_is_undisturbed(
    tiny_llama: TinyModel,
    sampling: dict[str, float],
    prefix_caching: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = requests_for(sampling)
    expected = alone(tiny_llama.folder, requests)
    with running(tiny_llama.folder, prefix_caching=prefix_caching, **SMALL) as rig:
        assert rig.run(*requests) == expected
        stats = rig.engine.stats()
        assert stats.preemptions > 0
        assert stats.tokens_swapped_out == stats.swap_capacity_nbytes == 0

    monkeypatch.setattr(SwapSpace, "is_cheaper", lambda self, num_tokens: True)
    settings = {**SMALL, "prefix_caching": prefix_caching, "swap_memory": 1 << 20}
    with running(tiny_llama.folder, **settings) as rig:
        assert rig.run(*requests) == expected
        stats = rig.engine.stats()
        assert 0 < stats.tokens_swapped_in <= stats.tokens_swapped_out
        assert stats.swap_used_nbytes == 0
        if not prefix_caching:  # nothing was computed twice
            assert stats.output_tokens_computed == len(requests) * (MAX_TOKENS - 1)


def test_host_memory_for_one_alone_is_shared_out(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some swap, some find the memory full and are computed again: the same tokens."""
    monkeypatch.setattr(SwapSpace, "is_cheaper", lambda self, num_tokens: True)
    requests = requests_for({})
    expected = alone(tiny_llama.folder, requests)
    with running(tiny_llama.folder) as rig:
        token_nbytes = rig.engine.model_config.kv_token_nbytes(rig.engine.copier._kv.data.dtype)
    settings = {**SMALL, "prefix_caching": False, "swap_memory": 40 * token_nbytes}
    with running(tiny_llama.folder, **settings) as rig:
        assert rig.run(*requests) == expected
        stats = rig.engine.stats()
        assert stats.preemptions > 0
        assert stats.swap_used_nbytes == 0
