"""What a step works on: plain arrays in tuples, as Numba takes them.

An *element* array holds the model's dtype: float32, or bfloat16 as uint16. Everything computed
between two products is float32; it is rounded where a product reads it. `group` is how many
elements of a product's K stand side by side: 2 for bfloat16, 1 for float32 (see tile.py).
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Elements = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

KEYS = 64
"""Keys that are packed together, two panels of them, and whose scores are taken together."""


class Shape(NamedTuple):
    num_layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    scale: float  # of the scores
    group: int
    has_head_norms: bool


class Weights(NamedTuple):
    """Matrices as panels, one behind the other; layer i's are i * layer_stride further."""

    panels: Elements  # flat
    layer_stride: int
    o_at: int  # qkv stands at 0
    gate_up_at: int
    down_at: int
    lm_head_at: int
    biases: Floats  # [layers, qkv + o + gate_up + down], each padded to whole panels
    lm_head_bias: Floats  # zeros, padded likewise
    norms: Floats  # [layers, 2, hidden]
    head_norms: Floats  # [layers, 2, head_dim]
    norm: Floats  # [hidden]
    embedding: Elements  # [vocab, hidden]
    windows: Ints  # [layers], 0 is none


class Step(NamedTuple):
    """T tokens of B sequences; L rows of logits."""

    input_ids: Ints  # [T]
    slots: Ints  # [T]
    cos: Floats  # [T, head_dim / 2]
    sin: Floats
    block_tables: Ints  # [B, blocks]
    first_rows: Ints  # [B + 1]
    seq_lens: Ints  # [B]
    logits_rows: Ints  # [L]
    lone: Ints  # [N] sequences with one new token
    packed: Ints  # [P] those with more
    pack_items: Ints  # [num, 2] (index in `packed`, block of KEYS)
    tile_items: Ints  # [num, 2] (index in `packed`, first of its (token, head) rows)
    packed_at: Ints  # [P] first element in packed_k and packed_v, of KV head 0
    packed_stride: Ints  # [P] elements from one KV head to the next


class Cache(NamedTuple):
    """The KV pool, [layers, 2, blocks, block_size, kv_heads, head_dim], flat."""

    elements: Elements
    words: npt.NDArray[np.uint32]  # the same memory
    plane: int  # elements of one layer's K or V
    block_size: int


class Scratch(NamedTuple):
    hidden: Floats  # [T, hidden]: the residual stream
    tiles: Elements  # row tiles of `hidden`, normed; later of logits_rows
    qkv: Floats  # [T, (heads + 2 kv_heads) * head_dim]
    q: Elements  # [T, heads, head_dim], rotated
    attended: Elements  # row tiles of heads * head_dim
    gated: Elements  # row tiles of `inner`
    packed_k: Elements
    packed_k_words: npt.NDArray[np.uint32]
    packed_v: Elements
    logits: Floats  # [L, vocab]
    floats: Floats  # [threads, thread_floats(shape)]
    elements: Elements  # [threads, thread_elements(shape)]
    offsets: Ints  # [threads, 2, KEYS]
