"""The decoder against transformers: every family, float32, in ragged batches over paged KV."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import ModelConfig, RopeConfig
from engine.model import Model
from engine.rope import rope_inv_freq
from engine.weights import load_weights, random_weights
from tests.engine.conftest import TinyModel
from tests.engine.model_driver import ModelDriver, random_prompt

CPU = torch.device("cpu")


def drive(tiny: TinyModel) -> ModelDriver:
    config = ModelConfig.from_folder(tiny.folder)
    model = Model(config, load_weights(tiny.folder, config, torch.float32, CPU))
    return ModelDriver(model, config, torch.float32, CPU)


def test_logits_are_those_of_transformers(tiny_model: TinyModel) -> None:
    driver = drive(tiny_model)
    token_ids = random_prompt(61, seed=1)
    with torch.no_grad():
        expected = tiny_model.reference(torch.tensor([token_ids])).logits[0]
    seq = driver.add(token_ids, 61)
    for n in (7, 16, 1, 1, 30, 2, 4):
        logits = driver.step([(seq, n)])
        torch.testing.assert_close(logits[0], expected[seq.num_computed - 1], atol=1e-4, rtol=1e-4)


def test_ragged_batches_generate_the_tokens_of_transformers(tiny_model: TinyModel) -> None:
    """Chunked prefills and decodes of several sequences share steps, in shuffled blocks."""
    prompts = [random_prompt(length, seed=length) for length in (1, 5, 23, 40, 64)]
    outputs = drive(tiny_model).generate(prompts, num_output=12, chunk_seed=5)
    for prompt, output in zip(prompts, outputs, strict=True):
        generated = tiny_model.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),  # else it hides the pad token in a prompt
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=0,
        )
        assert output == generated[0, len(prompt) :].tolist()


def test_only_wanted_logits_are_computed(tiny_llama: TinyModel) -> None:
    driver = drive(tiny_llama)
    seqs = [driver.add(random_prompt(6, seed), 6) for seed in range(3)]
    assert driver.step([(seq, 6) for seq in seqs]).shape == (3, 199)
    assert driver.step([(driver.add([1], 1), 1)]).dtype == torch.float32


def test_bfloat16_stays_near_float32(tiny_llama: TinyModel) -> None:
    config = ModelConfig.from_folder(tiny_llama.folder)
    model = Model(config, random_weights(config, 1, torch.bfloat16, CPU))
    exact = Model(config, random_weights(config, 1, torch.float32, CPU))
    token_ids = random_prompt(30, seed=2)
    rounded, expected = (
        driver.step([(driver.add(token_ids, 30), 30)])[0]
        for driver in (
            ModelDriver(model, config, torch.bfloat16, CPU),
            ModelDriver(exact, config, torch.float32, CPU),
        )
    )
    assert rounded.dtype == torch.float32
    assert (rounded.log_softmax(-1) - expected.log_softmax(-1)).abs().max() < 0.1


_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        (RopeConfig("linear", 500_000.0, 8.0), {}),
        (RopeConfig("llama3", 500_000.0, 8.0, 1.0, 4.0, 8192), _LLAMA3),
    ],
)
def test_rope_scaling_is_that_of_transformers(rope: RopeConfig, scaling: dict[str, float]) -> None:
    parameters = {"rope_type": rope.kind, "rope_theta": 500_000.0, "factor": 8.0, **scaling}
    theirs = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS[rope.kind](theirs, None)
    torch.testing.assert_close(rope_inv_freq(rope, 128), expected, rtol=1e-5, atol=0)
