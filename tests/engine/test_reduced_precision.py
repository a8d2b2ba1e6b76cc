"""bfloat16, the real model: what a relay changes in the logits, and what the dtype itself costs.

Stated tolerance: handing KV over changes nothing, bit for bit, where block sizes are equal; with
other block sizes, or the prompt split into other chunks, a log-probability moves by at most 0.5
(mean 0.05). On this CPU both are 0 as well, but kernels may choose otherwise elsewhere.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig
from engine.kv_cache import KVCache
from engine.model import Model
from engine.weights import load_weights

CPU = torch.device("cpu")
MAX_DIFFERENCE, MEAN_DIFFERENCE = 0.5, 0.05
PROMPTS = [
    [random.Random(seed).randrange(17, 49152) for _ in range(length)]
    for seed, length in enumerate((1, 17, 64, 150))
]
OUTPUTS = [5, 6, 7]


@dataclass
class Whole:
    """Tokens [0, num_tokens) of every layer and head."""

    num_tokens: int
    num_layers: int
    num_heads: int
    first_token: int = 0
    first_layer: int = 0
    first_head: int = 0


class Runner:
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.config = ModelConfig.from_folder(folder)
        self.dtype = dtype
        self.model = Model(self.config, load_weights(folder, self.config, dtype, CPU))

    def cache(self, block_size: int) -> KVCache:
        return KVCache(self.config, 256 // block_size, block_size, self.dtype, CPU)

    @torch.inference_mode()
    def logits(self, kv: KVCache, tokens: Sequence[int], start: int) -> torch.Tensor:
        """[vocab] after the last token; positions from `start`."""
        blocks = np.arange(kv.num_blocks)[::-1].copy()
        row = BatchRow(np.array(tokens), start, blocks, wants_logits=True)
        return self.model.forward(BatchInput.build([row], kv.block_size, CPU), kv).logits[0]

    def generate(self, kv: KVCache, prompt: Sequence[int]) -> list[torch.Tensor]:
        """Logits of each step of a fixed continuation."""
        return [
            self.logits(kv, [token], len(prompt) + index) for index, token in enumerate(OUTPUTS)
        ]


@pytest.fixture(scope="module")
def bf16(smollm2: Path) -> Runner:
    return Runner(smollm2, torch.bfloat16)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)}-tokens")
@pytest.mark.parametrize(("sender_block", "receiver_block"), [(16, 16), (16, 64), (64, 16)])
def test_relayed_kv_changes_no_logit(
    bf16: Runner, prompt: list[int], sender_block: int, receiver_block: int
) -> None:
    sender, receiver = bf16.cache(sender_block), bf16.cache(receiver_block)
    bf16.logits(sender, prompt, 0)
    part = Whole(len(prompt), bf16.config.num_layers, bf16.config.num_kv_heads)
    payload = torch.empty(sender.payload_nbytes(part), dtype=torch.uint8)
    sender.gather(list(range(sender.num_blocks))[::-1], part, payload)
    receiver.scatter(list(range(receiver.num_blocks))[::-1], part, payload)
    single = bf16.generate(sender, prompt)
    relayed = bf16.generate(receiver, prompt)
    if sender_block == receiver_block:
        assert torch.equal(torch.stack(single), torch.stack(relayed))
    assert_close(single, relayed)


@pytest.mark.parametrize("prompt", PROMPTS[1:], ids=lambda prompt: f"{len(prompt)}-tokens")
def test_other_chunks_stay_within_tolerance(bf16: Runner, prompt: list[int]) -> None:
    whole, chunked = bf16.cache(16), bf16.cache(16)
    at_once = bf16.logits(whole, prompt, 0)
    for start in range(0, len(prompt), 13):
        last = bf16.logits(chunked, prompt[start : start + 13], start)
    assert_close([at_once], [last])
    assert_close(bf16.generate(whole, prompt), bf16.generate(chunked, prompt))


@torch.inference_mode()
def test_bf16_is_as_near_to_float32_as_transformers_is(bf16: Runner, smollm2: Path) -> None:
    """The dtype costs what it costs; our own code adds nothing to it."""
    exact = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    our_error = their_error = 0.0
    for length in (17, 30, 64, 100, 150, 200):  # in short prompts chance decides
        prompt = [random.Random(length).randrange(17, 49152) for _ in range(length)]
        ids = torch.tensor([prompt])
        truth = logprobs(exact(ids).logits[0, -1])
        our_error += (logprobs(bf16.logits(bf16.cache(16), prompt, 0)) - truth).abs().mean().item()
        their_error += (logprobs(theirs(ids).logits[0, -1]) - truth).abs().mean().item()
    assert our_error <= 1.2 * their_error, (our_error, their_error)


def logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(dim=-1)


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    difference = (logprobs(torch.stack(ours)) - logprobs(torch.stack(theirs))).abs()
    assert difference.max() <= MAX_DIFFERENCE, difference.max()
    assert difference.mean() <= MEAN_DIFFERENCE, difference.mean()
