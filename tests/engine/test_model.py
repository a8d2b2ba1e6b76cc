"""The decoder against transformers: every family, float32, in ragged batches over paged KV."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig
from engine.kv_cache import KVCache
from engine.model import Model, rope_inv_freq
from engine.weights import load_weights, random_weights
from tests.engine.conftest import TinyModel

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 96


@dataclass
class Running:
    """A sequence driven by hand: the part of an engine these tests need."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)


class Runner:
    """Feeds sequences to a model, any number of tokens at a time."""

    def __init__(self, model: Model, dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self.kv = KVCache(model.config, NUM_BLOCKS, BLOCK_SIZE, dtype, CPU)
        self._free = random.Random(3).sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)

    def add(self, token_ids: list[int], max_len: int) -> Running:
        blocks = [self._free.pop() for _ in range(-(-max_len // BLOCK_SIZE))]
        return Running(list(token_ids), blocks)

    def step(self, scheduled: list[tuple[Running, int]]) -> Tensor:
        """Computes n more tokens of each; logits of the last of each, [B, vocab]."""
        rows = [
            BatchRow(
                np.array(seq.token_ids[seq.num_computed : seq.num_computed + n]),
                seq.num_computed,
                np.array(seq.block_ids),
                True,
            )
            for seq, n in scheduled
        ]
        logits = self.model.forward(BatchInput.build(rows, BLOCK_SIZE, CPU), self.kv)
        for (seq, n), row in zip(scheduled, logits, strict=True):
            seq.num_computed += n
            seq.logits.append(row)
        return logits


def load(tiny: TinyModel) -> Model:
    config = ModelConfig.from_folder(tiny.folder)
    return Model(config, load_weights(tiny.folder, config, torch.float32, CPU))


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(199), k=length)


def test_logits_are_those_of_transformers(tiny_model: TinyModel) -> None:
    runner = Runner(load(tiny_model))
    token_ids = prompt(61, 1)
    with torch.no_grad():
        expected = tiny_model.reference(torch.tensor([token_ids])).logits[0]
    seq = runner.add(token_ids, 61)
    for n in (7, 16, 1, 1, 30, 2, 4):
        logits = runner.step([(seq, n)])
        torch.testing.assert_close(logits[0], expected[seq.num_computed - 1], atol=1e-4, rtol=1e-4)


def test_ragged_batches_generate_the_tokens_of_transformers(tiny_model: TinyModel) -> None:
    """Chunked prefills and decodes of several sequences share steps, in shuffled blocks."""
    runner = Runner(load(tiny_model))
    num_output = 12
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 5, 23, 40, 64))]
    seqs = [runner.add(p, len(p) + num_output) for p in prompts]
    outputs: list[list[int]] = [[] for _ in seqs]
    chunk = random.Random(5)
    while any(len(out) < num_output for out in outputs):
        scheduled = [
            (seq, min(chunk.randint(1, 9), len(seq.token_ids) - seq.num_computed))
            for seq, out in zip(seqs, outputs, strict=True)
            if len(out) < num_output
        ]
        chosen = runner.step(scheduled).argmax(-1).tolist()
        for (seq, _), token_id in zip(scheduled, chosen, strict=True):
            if seq.num_computed == len(seq.token_ids):
                seq.token_ids.append(token_id)
                outputs[seqs.index(seq)].append(token_id)
    for p, out in zip(prompts, outputs, strict=True):
        generated = tiny_model.reference.generate(
            torch.tensor([p]), do_sample=False, max_new_tokens=num_output, pad_token_id=0
        )
        assert out == generated[0, len(p) :].tolist()
