"""Weights as panels: each matrix in the order in which tile.py reads it.

All of them lie in one allocation, in the order of the layers, so that a kernel finds any by adding.
It is backed by huge pages where the system has them: streaming the weights of a step through 4 KiB
pages took half as long again (docs/log.md).
"""

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.cpu.layout import Elements, Floats
from engine.cpu.simd import LANES
from engine.cpu.tile import PANEL


def as_elements(tensor: Tensor) -> Elements:
    """The tensor's own memory: float32, or bfloat16 as uint16."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    elements: Elements = tensor.numpy()  # host memory
    return elements


def group_of(dtype: torch.dtype) -> int:
    """Elements of K that a product reads at once."""
    return 2 if dtype is torch.bfloat16 else 1


def padded(num_out: int) -> int:
    """Columns of whole panels."""
    return -(-num_out // PANEL) * PANEL


def pack(weight: Tensor, into: Elements) -> None:
    """weight [out, in] → into, flat [padded(out) * in]"""
    num_out, num_in = weight.shape
    group = group_of(weight.dtype)
    rows = weight.new_zeros((padded(num_out), num_in))
    rows[:num_out] = weight
    panels = rows.view(-1, PANEL, num_in // group, group).transpose(1, 2)
    into.reshape(panels.shape)[...] = as_elements(panels.contiguous())


def interleave(gate_up: Tensor) -> Tensor:
    """Rows [gate, up], each `inner`, → 16 of gate, the same 16 of up, and so on."""
    halves = gate_up.view(2, -1, LANES, *gate_up.shape[1:])  # [2, inner / 16, 16, ...]
    return halves.transpose(0, 1).flatten(0, 2)


class PanelStore:
    """The allocation, filled front to back."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        hidden, inner, width = config.hidden_size, config.intermediate_size, _width(config)
        kv_width = config.num_kv_heads * config.head_dim
        sizes = (
            padded(width + 2 * kv_width) * hidden,
            padded(hidden) * width,
            2 * inner * hidden,
            padded(hidden) * inner,
        )
        _, self.o_at, self.gate_up_at, self.down_at = (sum(sizes[:i]) for i in range(4))
        self.layer_stride = sum(sizes)
        self.lm_head_at = self.layer_stride * config.num_layers
        total = self.lm_head_at + padded(config.vocab_size) * hidden
        # NumPy asks for huge pages for whatever is this large.
        self.elements: Elements = np.empty(
            total, dtype=np.uint16 if dtype is torch.bfloat16 else np.float32
        )
        self._end = 0

    def add(self, weight: Tensor) -> None:
        size = padded(weight.shape[0]) * weight.shape[1]
        pack(weight, self.elements[self._end : self._end + size])
        self._end += size


def bias_row(parts: list[tuple[Tensor | None, int]]) -> Floats:
    """One layer's biases [out], or zeros, each padded to whole panels."""
    row: Floats = np.zeros(sum(padded(num_out) for _, num_out in parts), dtype=np.float32)
    at = 0
    for bias, num_out in parts:
        if bias is not None:
            row[at : at + num_out] = bias.float().numpy()  # host memory
        at += padded(num_out)
    return row


def _width(config: ModelConfig) -> int:
    return config.num_heads * config.head_dim
