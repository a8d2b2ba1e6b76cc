"""Memory between two products: kept from step to step, grown when a step needs more."""

import numpy as np
import torch

from engine.cpu.layout import KEYS, Elements, Floats, Ints, Scratch, Shape, Step
from engine.cpu.project import PRODUCT
from engine.cpu.simd import LANES
from engine.cpu.tile import PANEL, TILE


class ScratchPool:
    """One per model; what it gives is used by one step at a time."""

    def __init__(self, shape: Shape, dtype: torch.dtype, num_threads: int) -> None:
        self._shape = shape
        self._dtype = np.uint16 if dtype is torch.bfloat16 else np.float32
        num_floats = max(
            TILE * (shape.head_dim + 2 * PANEL + LANES + 1),
            shape.heads * (shape.head_dim + KEYS + 2),
            PRODUCT,
        )
        # Rows of whole cache lines: threads write side by side.
        self._floats: Floats = np.zeros((num_threads, _lines(num_floats)), dtype=np.float32)
        num_elements = TILE * max(shape.head_dim + KEYS, shape.hidden)
        self._elements: Elements = np.zeros((num_threads, _lines(num_elements)), dtype=self._dtype)
        self._offsets: Ints = np.zeros((num_threads, 2, KEYS), dtype=np.int64)
        self._rows: Ints = np.arange(0, dtype=np.int64)
        self._kept: dict[str, Elements] = {}

    def rows(self, num_tokens: int) -> Ints:
        """0 ... num_tokens - 1"""
        if len(self._rows) < num_tokens:
            self._rows = np.arange(2 * num_tokens, dtype=np.int64)
        return self._rows[:num_tokens]

    def for_head(self, num_rows: int) -> tuple[Elements, Floats, Elements]:
        """`tiles`, `floats` and `elements` for so many rows."""
        tiled = -(-num_rows // TILE) * TILE
        return self._get("tiles", tiled * self._shape.hidden), self._floats, self._elements

    def of(self, step: Step) -> Scratch:
        shape, num_tokens, num_logits = self._shape, len(step.slots), len(step.logits_rows)
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        tiled = -(-max(num_tokens, num_logits) // TILE) * TILE
        num_packed = int((step.packed_stride * shape.kv_heads).sum())
        packed_k = self._get("packed_k", num_packed)
        return Scratch(
            hidden=self._get_floats("hidden", num_tokens * shape.hidden),
            tiles=self._get("tiles", tiled * shape.hidden),
            qkv=self._get_floats("qkv", num_tokens * (width + 2 * kv_width)),
            q=self._get("q", num_tokens * width),
            attended=self._get("attended", tiled * width),
            gated=self._get("gated", tiled * shape.inner),
            packed_k=packed_k,
            packed_k_words=packed_k.view(np.uint32),
            packed_v=self._get("packed_v", num_packed),
            logits=self._get_floats("logits", num_logits * shape.vocab),
            floats=self._floats,
            elements=self._elements,
            offsets=self._offsets,
        )

    def _get(self, name: str, size: int) -> Elements:
        """At least so many, of the model's dtype; what they hold is finite."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < size:
            kept = self._kept[name] = np.zeros(max(size, 64), dtype=self._dtype)
        return kept

    def _get_floats(self, name: str, size: int) -> Floats:
        kept = self._kept.get(name)
        if kept is None or len(kept) < size:
            kept = self._kept[name] = np.zeros(max(size, 64), dtype=np.float32)
        return kept


def _lines(num_values: int) -> int:
    return -(-num_values // 64) * 64
