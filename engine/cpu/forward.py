"""The whole model over one batch, as every thread of the team runs it: see sync.py for how they
share the work, project.py, rotate.py, attend_one.py and attend_many.py for the regions.
"""

from engine.cpu.attend_many import attend_tile, pack, write_tile
from engine.cpu.attend_one import ask_for_first, attend_one, write_one
from engine.cpu.jit import kernel
from engine.cpu.layout import Cache, Elements, Floats, Ints, Scratch, Shape, Step, Weights
from engine.cpu.project import embed, norm, project, project_gated
from engine.cpu.rotate import rotate_and_write
from engine.cpu.sync import claim, commit, complete, first_of
from engine.cpu.tile import PANEL

REGIONS_PER_LAYER = 9
HEAD_REGIONS = 2
_MANY = 4
"""Sequences with one new token that are items enough for all threads."""


def num_regions(num_layers: int) -> int:
    return 1 + REGIONS_PER_LAYER * num_layers + HEAD_REGIONS


@kernel
def forward(
    counters: Ints,
    thread: int,
    shape: Shape,
    weights: Weights,
    step: Step,
    cache: Cache,
    scratch: Scratch,
    rows: Ints,
    first_layer: int,
    end_layer: int,
    has_head: bool,
) -> None:
    """Writes the KV of the batch, scratch.hidden and, at the end, scratch.logits. `rows`:
    0 ... T - 1. A pass may come in several calls, of one range of layers after the other; only the
    last, whose range may be empty, has the head."""
    if first_layer == 0:
        embed(counters, 0, thread, shape, step.input_ids, weights.embedding, scratch.hidden)
    for layer in range(first_layer, end_layer):
        first_region = 1 + layer * REGIONS_PER_LAYER
        _layer(counters, first_region, thread, shape, weights, step, cache, scratch, rows, layer)
    if has_head:
        region = 1 + shape.num_layers * REGIONS_PER_LAYER
        _head(
            counters, region, thread, shape, weights, step.logits_rows, scratch.hidden,
            scratch.tiles, scratch.logits, scratch.floats, scratch.elements,
        )  # fmt: skip


@kernel
def head(
    counters: Ints,
    thread: int,
    shape: Shape,
    weights: Weights,
    rows: Ints,
    hidden: Floats,
    tiles: Elements,
    logits: Floats,
    floats: Floats,
    elements: Elements,
) -> None:
    """logits [rows, vocab] of hidden [rows, hidden]; `rows` is 0 ... n - 1, the last four are
    as in Scratch."""
    _head(counters, 0, thread, shape, weights, rows, hidden, tiles, logits, floats, elements)


@kernel
def _head(
    counters: Ints,
    region: int,
    thread: int,
    shape: Shape,
    weights: Weights,
    rows: Ints,
    hidden: Floats,
    tiles: Elements,
    logits: Floats,
    floats: Floats,
    elements: Elements,
) -> None:
    if len(rows):
        own = elements[thread]
        x = norm(counters, region, thread, shape, rows, hidden, weights.norm, tiles, own)
        project(
            counters, region + 1, thread, len(rows), x, weights.panels, weights.lm_head_at,
            shape.hidden, shape.vocab, weights.lm_head_bias, False, logits, floats[thread],
        )  # fmt: skip


@kernel
def _layer(
    counters: Ints,
    region: int,
    thread: int,
    shape: Shape,
    weights: Weights,
    step: Step,
    cache: Cache,
    scratch: Scratch,
    rows: Ints,
    layer: int,
) -> None:
    num_rows, width = len(rows), shape.heads * shape.head_dim
    num_qkv = width + 2 * shape.kv_heads * shape.head_dim
    panels, base = weights.panels, layer * weights.layer_stride
    product, own = scratch.floats[thread], scratch.elements[thread]
    bias, norms = weights.biases[layer], weights.norms[layer]
    o_bias = (num_qkv + PANEL - 1) // PANEL * PANEL
    gate_bias = o_bias + (shape.hidden + PANEL - 1) // PANEL * PANEL
    down_bias = gate_bias + 2 * shape.inner

    x = norm(counters, region, thread, shape, rows, scratch.hidden, norms[0], scratch.tiles, own)
    project(
        counters, region + 1, thread, num_rows, x, panels, base, shape.hidden, num_qkv,
        bias, False, scratch.qkv, product,
    )  # fmt: skip
    window = weights.windows[layer]
    _ask_for_keys(counters, shape, step, cache, scratch, thread, layer, window)
    rotate_and_write(
        counters, region + 2, thread, shape, step, cache, scratch, layer, weights.head_norms[layer]
    )
    pack(counters, region + 3, thread, shape, step, cache, scratch, layer)
    _attend(counters, region + 4, shape, step, cache, scratch, thread, layer, window)
    project(
        counters, region + 5, thread, num_rows, scratch.attended, panels, base + weights.o_at,
        width, shape.hidden, bias[o_bias:], True, scratch.hidden, product,
    )  # fmt: skip
    x = norm(
        counters, region + 6, thread, shape, rows, scratch.hidden, norms[1], scratch.tiles, own
    )
    project_gated(
        counters, region + 7, thread, num_rows, x, panels, base + weights.gate_up_at,
        shape.hidden, shape.inner, bias[gate_bias:], shape.group, scratch.gated, product,
    )  # fmt: skip
    project(
        counters, region + 8, thread, num_rows, scratch.gated, panels, base + weights.down_at,
        shape.inner, shape.hidden, bias[down_bias:], True, scratch.hidden, product,
    )  # fmt: skip


@kernel
def _heads_together(shape: Shape, step: Step) -> int:
    """KV heads of a sequence with one new token that are one item."""
    # All heads of a block lie together: read together, if there are items enough without.
    return shape.kv_heads if len(step.lone) >= _MANY else 1


@kernel
def _ask_for_keys(
    counters: Ints,
    shape: Shape,
    step: Step,
    cache: Cache,
    scratch: Scratch,
    thread: int,
    layer: int,
    window: int,
) -> None:
    """Those of the thread's first item in `_attend`; memory has little else to do by then."""
    num_heads, num_tiles = shape.kv_heads, len(step.tile_items) * shape.kv_heads
    together = _heads_together(shape, step)
    items = num_tiles + len(step.lone) * num_heads // together
    item = first_of(counters, thread, items)
    if num_tiles <= item < first_of(counters, thread + 1, items):
        index, first = divmod((item - num_tiles) * together, num_heads)
        sequence, end = step.lone[index], first + together
        ask_for_first(shape, step, cache, scratch, thread, layer, window, sequence, first, end)


@kernel
def _attend(
    counters: Ints,
    region: int,
    shape: Shape,
    step: Step,
    cache: Cache,
    scratch: Scratch,
    thread: int,
    layer: int,
    window: int,
) -> None:
    """Tiles of the sequences with several new tokens first: they take longer."""
    num_heads, num_tiles = shape.kv_heads, len(step.tile_items) * shape.kv_heads
    together = _heads_together(shape, step)
    items = num_tiles + len(step.lone) * num_heads // together
    item = claim(counters, region, thread, items)
    while item >= 0:
        if item < num_tiles:
            index, first = step.tile_items[item // num_heads]
            attend_tile(shape, step, scratch, thread, window, index, item % num_heads, first)
            if commit(counters, thread):
                write_tile(shape, step, scratch, thread, index, item % num_heads, first)
                complete(counters, region)
        else:
            index, first = divmod((item - num_tiles) * together, num_heads)
            sequence, end = step.lone[index], first + together
            following = -1
            if together > 1 and index + 1 < len(step.lone):
                following = step.lone[index + 1]
            attend_one(
                shape, step, cache, scratch, thread, layer, window, sequence, following, first, end
            )
            if commit(counters, thread):
                write_one(shape, step, scratch, thread, sequence, first, end)
                complete(counters, region)
        item = claim(counters, region, thread, items)
