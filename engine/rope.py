"""Frequencies of the rotary embedding, as the configuration has them."""

import math

import torch
from torch import Tensor

from engine.config import RopeConfig


def rope_inv_freq(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians per position. llama3: wavelengths beyond the context it
    was trained on are stretched by `factor`, short ones kept, those between interpolated."""
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if rope.kind == "default":
        return inv_freq
    if rope.kind == "linear":
        return inv_freq / rope.factor
    turns = rope.original_max_position * inv_freq / (2 * math.pi)  # within the old context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # share of the original frequency
    return inv_freq * (kept + (1 - kept) / rope.factor)
