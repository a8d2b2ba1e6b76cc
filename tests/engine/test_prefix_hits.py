"""Prefix hits of one engine, in float32: never another token, whatever is shared, evicted or
preempted."""

import random
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.request import EngineRequest, Leg, PrefixHit, TokensOut
from tests.engine.conftest import TinyModel
from tests.engine.listener import Listener
from tests.engine.loop_rig import build_rig, wait_until
from tests.engine.requests import make_request


def repeated_bodies(count: int) -> list[EngineRequest]:
    """Prompts that begin with parts of a few long bodies; some greedy, some sampled."""
    draw = random.Random(3)
    bodies = [draw.choices(range(199), k=120) for _ in range(4)]
    requests = []
    for index in range(count):
        body = draw.choice(bodies)[: draw.choice((20, 64, 100, 120))]
        tail = draw.choices(range(199), k=draw.choice((0, 0, 1, 5, 17)))
        temperature = draw.choice((0.0, 0.9))
        request = make_request(
            str(index),
            prompt=(*body, *tail),
            max_tokens=draw.choice((1, 5, 30)),
            temperature=temperature,
            seed=index,
            ignore_eos=True,
        )
        requests.append(request)
    return requests


def answers(
    folder: Path, requests: list[EngineRequest], **settings: int
) -> tuple[list[tuple[int, ...]], Engine]:
    """All submitted at once. The engine is stopped, but still tells what it counted."""
    listener = Listener()
    settings = {"num_blocks": 128, "max_model_len": 256, "nice": 0, "num_threads": 1, **settings}
    engine = Engine(EngineConfig(folder, device="cpu", dtype="float32", **settings), listener)  # type: ignore[arg-type]
    engine.start()
    try:
        for request in requests:
            engine.submit(request)
        for request in requests:
            listener.wait_ended(request.request_id)
        wait_until(lambda: engine.stats().blocks.unused == engine.num_blocks)
        assert engine.failure is None
    finally:
        engine.stop()
    return [listener.tokens(request.request_id) for request in requests], engine


def test_hits_never_change_tokens(tiny_llama: TinyModel) -> None:
    requests = repeated_bodies(300)
    expected, cold = answers(tiny_llama.folder, requests, prefix_caching=False)
    assert cold.stats().prompt_tokens_hit == cold.stats().blocks.cached == 0
    roomy, warm = answers(tiny_llama.folder, requests, block_size=16)
    assert roomy == expected
    assert warm.stats().prompt_tokens_computed < cold.stats().prompt_tokens_computed / 2
    # 44 blocks of 4: hardly more than one long prompt, so cached blocks go and sequences give way.
    tight, pressed = answers(
        tiny_llama.folder, requests, block_size=4, num_blocks=44, token_budget=40
    )
    assert tight == expected
    assert pressed.stats().prompt_tokens_hit > 0
    assert pressed.stats().preemptions > 0


@pytest.mark.parametrize("leg", [Leg.LOCAL, Leg.PREFILL])
def test_a_hit_is_told_before_the_step(leg: Leg) -> None:
    rig = build_rig(prefix_caching=True)
    rig.loop.start()
    warm = make_request("warm", prompt_len=12, max_tokens=1)
    rig.loop.submit(warm)
    rig.listener.wait_ended(warm.request_id)
    again = make_request("again", prompt_len=13, max_tokens=1, leg=leg)
    rig.loop.submit(again)
    rig.listener.wait_for(TokensOut, again.request_id)
    hit, *rest = rig.listener.events(again.request_id)
    assert isinstance(hit, PrefixHit)
    assert (hit.num_cached_tokens, hit.queue_ns > 0) == (12, True)
    assert rest
    rig.loop.abort(again.request_id)
    rig.wait_free()
    assert rig.loop.stats().prompt_tokens_hit == 12
    assert rig.loop.stats().prompt_tokens_computed == 12 + 1
    rig.loop.stop()
