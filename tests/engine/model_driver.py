"""Drives a model by hand, without an engine: sequences over shuffled blocks, any number of tokens
at a time. What the tests of the model, on any device, have in common."""

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.batch import BatchRow, PackedBatch
from engine.config import ModelConfig
from engine.decoder import Decoder
from engine.kv_cache import KVCache
from engine.tp.ranks import ALONE, Ranks

BLOCK_SIZE = 4
NUM_BLOCKS = 96


@dataclass
class Running:
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    output: list[int] = field(default_factory=list)


class ModelDriver:
    def __init__(
        self,
        model: Decoder,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = BLOCK_SIZE,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self.model = model
        self.block_size = block_size
        self.kv = KVCache(config, NUM_BLOCKS, block_size, dtype, device, has_scratch=True)
        model.prepare(self.kv)
        self._free = random.Random(3).sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)

    def add(self, token_ids: list[int], max_len: int) -> Running:
        blocks = [self._free.pop() for _ in range(-(-max_len // self.block_size))]
        return Running(list(token_ids), blocks)

    def step(self, scheduled: list[tuple[Running, int]]) -> Tensor:
        """Computes n more tokens of each; the logits of the last of each, [B, vocab]."""
        rows = [
            BatchRow(
                np.array(seq.token_ids[seq.num_computed : seq.num_computed + n], dtype=np.int64),
                seq.num_computed,
                np.array(seq.block_ids, dtype=np.int64),
                True,
            )
            for seq, n in scheduled
        ]
        packed = PackedBatch.of(rows, self.block_size)
        self._ranks.forward(packed)
        batch = packed.to(self.kv.device)
        logits = self.model.forward(batch, self.kv).logits.clone()  # they are the model's
        for seq, n in scheduled:
            seq.num_computed += n
        return logits

    def generate(
        self, prompts: list[list[int]], num_output: int, chunk_seed: int
    ) -> list[list[int]]:
        """Greedy, all prompts in one batch, prefilled in random chunks of up to 9 tokens."""
        seqs = [self.add(prompt, len(prompt) + num_output) for prompt in prompts]
        chunk = random.Random(chunk_seed)
        while running := [seq for seq in seqs if len(seq.output) < num_output]:
            left = [len(seq.token_ids) - seq.num_computed for seq in running]
            scheduled = [
                (seq, min(chunk.randint(1, 9), n)) for seq, n in zip(running, left, strict=True)
            ]
            chosen = self.step(scheduled).argmax(-1).tolist()
            for seq, token_id in zip(running, chosen, strict=True):
                if seq.num_computed == len(seq.token_ids):
                    seq.token_ids.append(token_id)
                    seq.output.append(token_id)
        return [seq.output for seq in seqs]


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(199), k=length)
