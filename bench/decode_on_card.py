"""Decode steps on one device, by batch size: tokens a second beside what its memory allows. What
`python -m bench.step --device cuda` runs.

A step reads all weights once and the KV of every sequence; at the memory's speed that takes the
ceiling's time. By each attention that can be had, replayed and as it comes; times are of many steps
one behind the other, host included, from the batch on the host to logits on the device.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.ceiling import weights_nbytes
from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig, ModelError
from engine.decoder import Decoder, Kernels, load_decoder
from engine.engine_config import EngineConfig
from engine.kv_cache import KVCache

BLOCK_SIZE = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64)
KINDS: tuple[Kernels, ...] = ("flashinfer", "torch")


@dataclass(frozen=True)
class Figure:
    """One batch size by one way."""

    kernels: str
    is_replayed: bool
    num_seqs: int
    context: int
    ms: float
    tokens_s: float
    ceiling_tokens_s: float

    def line(self) -> str:
        how = "replayed" if self.is_replayed else "as it comes"
        share = self.tokens_s / self.ceiling_tokens_s
        return (
            f"{self.kernels}, {how}: {self.num_seqs} x {self.context}: {self.ms:.2f} ms, "
            f"{self.tokens_s:.0f} tokens/s, {share:.0%} of {self.ceiling_tokens_s:.0f}"
        )


def measure(
    model_path: Path, device: torch.device, context: int, repeats: int = 50
) -> Iterator[Figure]:
    """Skips, with a line, what cannot be had here."""
    model = ModelConfig.from_folder(model_path)
    read_nbytes_s = read_speed(device)
    print(f"ceiling: {device} reads {read_nbytes_s / 1e9:.0f} GB/s")
    for kernels in KINDS:
        for is_replayed in (True, False):
            config = EngineConfig(
                model_path,
                kernels=kernels,
                max_num_seqs=max(BATCHES),
                max_model_len=context + 1,
                cuda_graphs=is_replayed,
            )
            try:
                decoder = load_decoder(config, model, model.dtype, device)
            except ModelError as error:
                print(f"{kernels}: {error}")
                break
            kv = pool(model, context, device)
            decoder.prepare(kv)
            for num_seqs in BATCHES:
                seconds = step_s(decoder, kv, num_seqs, context, repeats)
                kv_nbytes = num_seqs * context * model.kv_token_nbytes(model.dtype)
                floor_s = (weights_nbytes(model_path) + kv_nbytes) / read_nbytes_s
                yield Figure(
                    kernels=kernels,
                    is_replayed=is_replayed,
                    num_seqs=num_seqs,
                    context=context,
                    ms=seconds * 1e3,
                    tokens_s=num_seqs / seconds,
                    ceiling_tokens_s=num_seqs / floor_s,
                )
            decoder.close()


def pool(model: ModelConfig, context: int, device: torch.device) -> KVCache:
    """As many blocks as the largest batch has."""
    num_blocks = max(BATCHES) * (context // BLOCK_SIZE + 1)
    return KVCache(model, num_blocks, BLOCK_SIZE, model.dtype, device, has_scratch=True)


@torch.inference_mode()
def step_s(decoder: Decoder, kv: KVCache, num_seqs: int, context: int, repeats: int) -> float:
    """Seconds of one step of sequences that have `context` tokens."""
    blocks = np.random.default_rng(1).permutation(kv.num_blocks)
    tables = blocks[: num_seqs * (context // BLOCK_SIZE + 1)].reshape(num_seqs, -1)
    token_ids = np.full(1, 17, dtype=np.int64)
    rows = [BatchRow(token_ids, context, table, wants_logits=True) for table in tables]

    def step() -> None:
        decoder.forward(BatchInput.build(rows, BLOCK_SIZE, kv.device), kv)

    return seconds_of(step, kv.device, repeats)


def read_speed(device: torch.device) -> float:
    """Bytes a second: the sum of a gigabyte, which no cache holds."""
    source = torch.ones(1 << 28, device=device)
    return source.nbytes / seconds_of(lambda: torch.sum(source), device, 20)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of one call, of `repeats` queued one behind the other, after a few that do not count."""
    for _ in range(3):
        work()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / repeats


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
