"""The copies of a handoff, each alone on one thread: what a frame costs beside the network."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.config import ModelConfig
from engine.kv_cache import KVCache
from kvfabric.frame import FrameRange, payload_checksum

_NUM_BLOCKS, _BLOCK_SIZE, _REPEATS = 2048, 16, 15


def copies_gb_s(model_path: Path, frame_nbytes: int) -> dict[str, float]:
    """Of a frame of about that size: gather out of pool blocks, checksum, scatter into others.
    Blocks are far apart, and each round takes others: no cache has them."""
    config = ModelConfig.from_folder(model_path)
    kv = KVCache(config, _NUM_BLOCKS, _BLOCK_SIZE, torch.bfloat16, torch.device("cpu"))
    kv.data.fill_(1.0)
    token_nbytes = kv.payload_nbytes(_frame(config, 1))
    num_tokens = frame_nbytes // token_nbytes // _BLOCK_SIZE * _BLOCK_SIZE
    part, nbytes = _frame(config, num_tokens), num_tokens * token_nbytes
    staging = torch.zeros(nbytes, dtype=torch.uint8)
    num_blocks = num_tokens // _BLOCK_SIZE
    ids = torch.randperm(_NUM_BLOCKS).tolist()
    rounds = [ids[i : i + num_blocks] for i in range(0, len(ids) - num_blocks + 1, num_blocks)]
    works: dict[str, Callable[[list[int]], object]] = {
        "gather": lambda blocks: kv.gather(blocks, part, staging),
        "checksum": lambda blocks: payload_checksum(staging.numpy().data),
        "scatter": lambda blocks: kv.scatter(blocks, part, staging),
    }
    return {name: round(nbytes / _ns(work, rounds), 2) for name, work in works.items()}


def _frame(config: ModelConfig, num_tokens: int) -> FrameRange:
    return FrameRange(0, num_tokens, 0, config.num_layers, 0, config.num_kv_heads)


def _ns(work: Callable[[list[int]], object], rounds: list[list[int]]) -> float:
    times = []
    for i in range(_REPEATS):
        began = time.perf_counter_ns()
        work(rounds[i % len(rounds)])
        times.append(time.perf_counter_ns() - began)
    return float(statistics.median(times[2:]))
