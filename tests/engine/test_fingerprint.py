"""What makes two engines strangers, and what does not."""

from dataclasses import replace

import pytest
import torch

from engine.config import RopeConfig
from engine.fingerprint import facts, fingerprint
from kvfabric.facts import difference
from tests.engine.test_kv_cache import CONFIG

DIGEST = bytes(range(32))


def test_golden() -> None:
    """The same in every process and on every machine. A change here needs a new KV format."""
    ours = fingerprint(CONFIG, DIGEST, torch.bfloat16, 1)
    assert len(ours) == 32
    assert ours.hex() == "685b2a37a6dcbe5d98905480326e4491e3da8297a5587f6ddbd2e9f83ccd1fbb"


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": RopeConfig("default", 20_000.0)},
        {"num_layers": 4},
        {"windows": (None, None, 8)},
        {"qk_norm": True},
        {"rms_norm_eps": 1e-5},
    ],
)
def test_the_config_counts(changes: dict[str, object]) -> None:
    changed = replace(CONFIG, **changes)  # type: ignore[arg-type]
    assert fingerprint(changed, DIGEST, torch.bfloat16, 1) != fingerprint(
        CONFIG, DIGEST, torch.bfloat16, 1
    )


def test_weights_dtype_and_wire_count() -> None:
    prints = {
        fingerprint(CONFIG, DIGEST, torch.bfloat16, 1),
        fingerprint(CONFIG, DIGEST[::-1], torch.bfloat16, 1),
        fingerprint(CONFIG, DIGEST, torch.float32, 1),
        fingerprint(CONFIG, DIGEST, torch.bfloat16, 2),
    }
    assert len(prints) == 4


def test_what_does_not_shape_kv_does_not_count() -> None:
    same = replace(
        CONFIG,
        eos_token_ids=frozenset({1}),
        dtype=torch.float32,  # what the file holds; the engine computes in its own
        max_position_embeddings=32,
    )
    assert fingerprint(same, DIGEST, torch.bfloat16, 1) == fingerprint(
        CONFIG, DIGEST, torch.bfloat16, 1
    )


def test_facts_tell_people_what_it_is_of() -> None:
    told = facts(CONFIG, DIGEST, torch.bfloat16, 1)
    assert told == (
        f"dtype=bfloat16;model={CONFIG.architecture};layers={CONFIG.num_layers};"
        f"KV heads={CONFIG.num_kv_heads};head size={CONFIG.head_dim};weights=000102030405;"
        "wire version=1"
    )
    assert len(told) < 192, "the handshake has so much room"


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        (facts(CONFIG, DIGEST, torch.float32, 1), "dtype is bfloat16 here and float32 there"),
        (
            facts(replace(CONFIG, architecture="Other"), DIGEST, torch.bfloat16, 1),
            f"model is {CONFIG.architecture} here and Other there",
        ),
        (
            facts(replace(CONFIG, num_layers=99), DIGEST, torch.bfloat16, 1),
            f"layers is {CONFIG.num_layers} here and 99 there",
        ),
        (
            facts(replace(CONFIG, num_kv_heads=98), DIGEST, torch.bfloat16, 1),
            f"KV heads is {CONFIG.num_kv_heads} here and 98 there",
        ),
        (
            facts(replace(CONFIG, head_dim=97), DIGEST, torch.bfloat16, 1),
            f"head size is {CONFIG.head_dim} here and 97 there",
        ),
        (
            facts(CONFIG, DIGEST[::-1], torch.bfloat16, 1),
            "weights is 000102030405 here and 1f1e1d1c1b1a there",
        ),
        (facts(CONFIG, DIGEST, torch.bfloat16, 2), "wire version is 1 here and 2 there"),
    ],
)
def test_each_fact_that_differs_is_named_in_a_refusal(theirs: str, sentence: str) -> None:
    assert difference(facts(CONFIG, DIGEST, torch.bfloat16, 1), theirs) == sentence
