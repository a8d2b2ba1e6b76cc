"""An engine of two ranks says what an engine of one says: chunked, batched, preempted, forked, held
to a grammar; and what transformers says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import prompt_logprobs
from engine.request import RequestId, TokensOut
from engine.tp.shard import Shard
from tests.engine import test_prompt_logprobs
from tests.engine.conftest import TinyModel
from tests.engine.grammar_rig import starting
from tests.engine.requests import make_request
from tests.engine.test_engine import (
    PROMPTS,
    SAMPLING,
    alone,
    generated,
    requests_for,
    running,
)
from tests.grammars import FORMS

TIGHT = {"num_ranks": 2, "block_size": 4, "num_blocks": 27, "token_budget": 23}


@pytest.mark.parametrize("family", ["llama", "qwen2", "uneven-llama"])
def test_greedy_is_what_transformers_generates(
    tiny_models: Callable[[str], TinyModel], family: str
) -> None:
    model = tiny_models(family)
    with running(model.folder, num_ranks=2) as rig:
        assert rig.run(*requests_for({})) == [generated(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("sampling", "prefix_caching"), [(SAMPLING[2], True), (SAMPLING[3], False)]
)
def test_chunked_and_preempted_are_as_alone(
    tiny_llama: TinyModel, sampling: dict[str, Any], prefix_caching: bool
) -> None:
    requests = requests_for(sampling)
    expected = alone(tiny_llama.folder, requests)
    with running(tiny_llama.folder, prefix_caching=prefix_caching, **TIGHT) as rig:
        assert rig.run(*requests) == expected
        assert rig.engine.stats().preemptions > 0


def test_samples_that_fork_are_as_alone(tiny_llama: TinyModel) -> None:
    """Their partly filled block is copied on every rank."""
    request = make_request(
        "n", prompt=PROMPTS[3], max_tokens=20, temperature=1.0, seed=9, others=[(), (), ()]
    )
    assert len(PROMPTS[3]) % 16
    expected = samples_of(tiny_llama, 1, request)
    assert samples_of(tiny_llama, 2, request) == expected
    assert len(set(map(tuple, expected.values()))) == 4


def samples_of(model: TinyModel, num_ranks: int, request: Any) -> dict[int, list[int]]:
    with running(model.folder, num_ranks=num_ranks) as rig:
        rig.engine.submit(request)
        tokens: dict[int, list[int]] = {}
        count = 0
        while sum(map(len, tokens.values())) < 80:
            count += 1
            event = rig.listener.wait_for(TokensOut, RequestId("n"), count)
            tokens.setdefault(event.sample, []).extend(event.token_ids)
        return tokens


def test_prompt_logprobs_are_what_transformers_says(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "ROWS_AT_A_TIME", 5)
    with running(tiny_llama.folder, **TIGHT) as rig:
        rig.run(*test_prompt_logprobs.requests())
        test_prompt_logprobs.check(rig, tiny_llama)
        assert rig.engine.stats().preemptions > 0


def test_grammars_hold_on_two_ranks(text_model: Path) -> None:
    with starting(text_model) as start:
        one, two = (
            rig.run(*(rig.request(f.name, f.grammar, temperature=1.0, seed=3) for f in FORMS))
            for rig in (start(), start(shard=Shard(0, 2), token_budget=32))
        )
        assert one == two


def test_ranks_have_their_part_of_the_pool(tiny_models: Callable[[str], TinyModel]) -> None:
    """`kv_memory` is that of all of them."""
    model = tiny_models("uneven-llama")
    pools: list[tuple[int, ...]] = []
    facts: set[tuple[int, bytes]] = set()
    for num_ranks in (1, 2, 3):
        settings = {"num_blocks": None, "kv_memory": 1 << 20, "num_ranks": num_ranks}
        with running(model.folder, **settings) as rig:
            pools.append(rig.engine.kv_pool_nbytes)
            facts.add((rig.engine.num_blocks, rig.engine.fingerprint))
    assert len(facts) == 1
    assert [sum(pool) for pool in pools] == [pools[0][0]] * 3
    assert pools[1] == (pools[0][0] * 2 // 3, pools[0][0] // 3)
