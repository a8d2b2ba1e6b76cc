"""The test that must never break: in float32, tokens by prefill + transfer + decode = tokens by
one engine = tokens by transformers `generate`, however batched, chunked, preempted or resumed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.errors import InvalidRequest, RequestTooLong
from engine.request import (
    ChunkComputed,
    EngineRequest,
    FinishReason,
    Leg,
    RequestId,
    Reserved,
    TokensOut,
)
from engine.tp.shard import Shard
from tests.engine.conftest import TinyModel
from tests.engine.listener import Listener
from tests.engine.loop_rig import wait_until
from tests.engine.requests import make_request
from tests.engine.tp.threaded_ranks import other_ranks

DEADLINE_S = 30.0
MAX_TOKENS = 24
PROMPTS = [
    tuple((7 * i + k * k) % 199 for i in range(length))
    for k, length in enumerate((1, 5, 16, 33, 70))
]
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 2**63 + 1},
    {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
        "logit_bias": tuple((token_id, 3.0) for token_id in range(40)),
        "bad_words": tuple((first, last) for first in range(40) for last in range(20)),
    },
    {
        "temperature": 1.0,
        "min_p": 0.02,
        "frequency_penalty": 1.5,
        "allowed_token_ids": tuple(range(0, 199, 3)),
        "stop": frozenset(range(0, 60)),
        "min_tokens": MAX_TOKENS,
    },
]


@dataclass
class Rig:
    engine: Engine
    listener: Listener

    def run(self, *requests: EngineRequest) -> list[tuple[int, ...]]:
        """The output tokens of each, all in one batch as far as they fit."""
        for request in requests:
            self.engine.submit(request)
        for request in requests:
            assert self.listener.wait_ended(request.request_id) is FinishReason.LENGTH
        return [self.listener.tokens(request.request_id) for request in requests]


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Rig]:
    """An engine in float32; at the end all its blocks are free."""
    listener = Listener()
    num_ranks = settings.pop("num_ranks", 1)
    config = EngineConfig(
        folder,
        device="cpu",
        dtype="float32",
        num_threads=1,
        shard=Shard(0, num_ranks),
        **{"num_blocks": 64, "max_model_len": 256, "nice": 0, **settings},
    )
    with other_ranks(config) as ranks:
        engine = Engine(config, listener, ranks=ranks)
        engine.start()
        try:
            yield Rig(engine, listener)
            wait_until(lambda: engine.stats().blocks.unused == engine.num_blocks)
            assert engine.failure is None
        finally:
            engine.stop()


def requests_for(sampling: dict[str, Any]) -> list[EngineRequest]:
    return [
        make_request(f"{i}", prompt=prompt, max_tokens=MAX_TOKENS, **sampling)
        for i, prompt in enumerate(PROMPTS)
    ]


def alone(folder: Path, requests: list[EngineRequest]) -> list[tuple[int, ...]]:
    with running(folder, token_budget=512) as rig:
        return [rig.run(request)[0] for request in requests]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_greedy_is_what_transformers_generates(
    tiny_models: Callable[[str], TinyModel], family: str
) -> None:
    model = tiny_models(family)
    assert alone(model.folder, requests_for({})) == [generated(model, p) for p in PROMPTS]


def generated(model: TinyModel, prompt: tuple[int, ...]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output: Tensor = model.reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
    )
    return tuple(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("sampling", SAMPLING)
def test_batched_chunked_and_preempted_are_as_alone(
    tiny_llama: TinyModel, sampling: dict[str, Any]
) -> None:
    requests = requests_for(sampling)
    expected = alone(tiny_llama.folder, requests)
    assert len(set(expected)) == len(expected)
    with running(tiny_llama.folder) as rig:
        assert rig.run(*requests) == expected
    with running(tiny_llama.folder, token_budget=7, max_num_seqs=4) as rig:
        assert rig.run(*requests) == expected
    with running(tiny_llama.folder, block_size=4, num_blocks=27) as rig:
        assert rig.run(*requests) == expected
        assert rig.engine.stats().preemptions > 0


def test_seeds_and_samples_differ(tiny_llama: TinyModel) -> None:
    with running(tiny_llama.folder) as rig:
        outputs = rig.run(
            *(
                make_request(str(seed), prompt=PROMPTS[3], temperature=1.0, seed=seed, max_tokens=9)
                for seed in range(4)
            )
        )
    assert len(set(outputs)) == 4


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("delivered", [0, 1, 9])
def test_prefill_transfer_and_decode_are_as_one_engine(
    tiny_llama: TinyModel, sampling: dict[str, Any], delivered: int
) -> None:
    expected = alone(tiny_llama.folder, requests_for(sampling))
    with ExitStack() as stack:
        prefill = stack.enter_context(running(tiny_llama.folder, token_budget=32))
        decode = stack.enter_context(running(tiny_llama.folder, block_size=8, num_blocks=128))
        assert prefill.engine.fingerprint == decode.engine.fingerprint
        for request, outputs in zip(requests_for(sampling), expected, strict=True):
            tokens = relay(prefill, decode, request, outputs[:delivered])
            assert tokens == (outputs[delivered:] if delivered else outputs)
        assert prefill.engine.stats().output_tokens_computed == 0
        assert prefill.engine.stats().prompt_tokens_computed == sum(map(len, PROMPTS))
        assert decode.engine.stats().prompt_tokens_computed == 0


@dataclass(frozen=True)
class Part:
    """A `KVRange`: some tokens, all layers and heads."""

    first_token: int
    num_tokens: int
    num_layers: int
    num_heads: int
    first_layer: int = 0
    first_head: int = 0


def relay(
    prefill: Rig, decode: Rig, request: EngineRequest, delivered: tuple[int, ...]
) -> tuple[int, ...]:
    """Both legs of a request, each chunk copied as it is told of."""
    name, prompt = request.request_id, request.prompt_token_ids
    legs = {
        leg: EngineRequest(name, leg, prompt, request.sampling, delivered)
        for leg in (Leg.PREFILL, Leg.DECODE)
    }
    decode.engine.submit(legs[Leg.DECODE])
    decode.listener.wait_for(Reserved, name)
    into = decode.engine.claim(name).result(DEADLINE_S)
    prefill.engine.submit(legs[Leg.PREFILL])
    out_of = prefill.engine.lease(name).result(DEADLINE_S)
    layers, heads, head_nbytes = prefill.engine.kv_shape
    copied, count = 0, 0
    while copied < len(prompt):
        count += 1
        chunk = prefill.listener.wait_for(ChunkComputed, name, count)
        part = Part(copied, chunk.num_computed_tokens - copied, layers, heads)
        staging = prefill.engine.copier.allocate_staging(
            layers * 2 * part.num_tokens * heads * head_nbytes
        )
        prefill.engine.copier.gather(out_of, part, staging).result(DEADLINE_S)
        decode.engine.copier.scatter(into, part, staging).result(DEADLINE_S)
        copied = chunk.num_computed_tokens
        assert chunk.is_last == (copied == len(prompt))
    first = None if delivered else prefill.listener.wait_for(TokensOut, name).token_ids[0]
    prefill.engine.abort(name)
    decode.engine.attach(name, first)
    assert decode.listener.wait_ended(name) is FinishReason.LENGTH
    assert len(prefill.listener.of(TokensOut, name)) == (0 if delivered else 1)
    return decode.listener.tokens(name)


def test_a_local_resume_goes_on_where_it_was(tiny_llama: TinyModel) -> None:
    [request, *_] = requests_for(SAMPLING[1])
    [whole] = alone(tiny_llama.folder, [request])
    with running(tiny_llama.folder) as rig:
        for count in (1, 5, MAX_TOKENS - 1):
            resumed = EngineRequest(
                RequestId(f"resumed{count}"),
                Leg.LOCAL,
                request.prompt_token_ids,
                request.sampling,
                whole[:count],
            )
            assert rig.run(resumed) == [whole[count:]]


@pytest.mark.parametrize("leg", list(Leg))
def test_an_abort_in_each_state_leaves_all_blocks_free(tiny_llama: TinyModel, leg: Leg) -> None:
    request = make_request(prompt=PROMPTS[4], max_tokens=MAX_TOKENS, leg=leg)
    first_events: dict[Leg, list[type[TokensOut] | type[ChunkComputed] | type[Reserved]]] = {
        Leg.LOCAL: [TokensOut],
        Leg.PREFILL: [ChunkComputed, TokensOut],
        Leg.DECODE: [Reserved],
    }
    for await_event in (None, *first_events[leg]):
        with running(tiny_llama.folder, token_budget=16) as rig:
            rig.engine.submit(request)
            if await_event is not None:
                rig.listener.wait_for(await_event, request.request_id)
            if leg is Leg.DECODE and await_event is not None:
                lease = rig.engine.claim(request.request_id).result(DEADLINE_S)
                lease.enter()
                rig.engine.abort(request.request_id)
                wait_until(lambda rig=rig: rig.engine.stats().blocks.in_flight > 0)  # type: ignore[misc]
                lease.exit()
            rig.engine.abort(request.request_id)
            rig.engine.attach(request.request_id, 1)


def test_limits_are_told(tiny_llama: TinyModel) -> None:
    with running(tiny_llama.folder, num_blocks=4, block_size=16) as rig:
        assert rig.engine.max_model_len == 64
        with pytest.raises(RequestTooLong, match="64"):
            rig.engine.submit(make_request(prompt_len=64))
        [tokens] = rig.run(make_request(prompt_len=60, max_tokens=100))
        assert len(tokens) == 4
        with pytest.raises(InvalidRequest):
            rig.engine.attach(RequestId("r"), 199)


def test_end_ids_of_the_request_stop_it(tiny_llama: TinyModel) -> None:
    [request] = [r for r in requests_for({}) if len(r.prompt_token_ids) == 5]
    [tokens] = alone(tiny_llama.folder, [request])
    stop = tokens[3]
    with running(tiny_llama.folder) as rig:
        rig.engine.submit(
            make_request(
                prompt=request.prompt_token_ids, max_tokens=MAX_TOKENS, stop=frozenset({stop})
            )
        )
        assert rig.listener.wait_ended(RequestId("r")) is FinishReason.STOP
        assert rig.listener.tokens(RequestId("r")) == tokens[: tokens.index(stop) + 1]
