"""Row-wise work of a layer: norms, and the products with what follows each of them fused in.

Kernels; each is one region of a step (see sync.py). Products are made in memory of the thread's
own and written out, or added to what is there, when they are whole.
"""

import math

from engine.cpu.jit import kernel
from engine.cpu.layout import Elements, Floats, Ints, Shape
from engine.cpu.simd import (
    LANES,
    add,
    div,
    exp,
    fma,
    load,
    mul,
    splat,
    store,
    store_columns,
    sub,
    sum_lanes,
    zeros,
)
from engine.cpu.sync import claim, claim_alone, commit, complete
from engine.cpu.tile import PANEL, TILE, height_of, multiply

_GROUP_ROWS = 12 * TILE
"""Rows whose tiles stay in the core's cache while panels pass by."""
_FEW_ROWS, _MOST_PANELS = 2 * TILE, 8
PRODUCT = max(_GROUP_ROWS, _FEW_ROWS * _MOST_PANELS) * PANEL
"""Floats of an item's product."""


@kernel
def num_tiles(num_rows: int) -> int:
    return (num_rows + TILE - 1) // TILE


@kernel
def embed(
    counters: Ints,
    region: int,
    thread: int,
    shape: Shape,
    ids: Ints,
    table: Elements,
    hidden: Floats,
) -> None:
    """hidden [T, hidden] = the tokens' rows of the table."""
    width, flat = shape.hidden, table.reshape(-1)
    items = num_tiles(len(ids))
    item = claim_alone(counters, region, thread, items)
    while item >= 0:
        for row in range(item * TILE, min((item + 1) * TILE, len(ids))):
            for column in range(0, width, LANES):
                store(hidden, row * width + column, load(flat, ids[row] * width + column))
        complete(counters, region)
        item = claim_alone(counters, region, thread, items)


@kernel
def norm(
    counters: Ints,
    region: int,
    thread: int,
    shape: Shape,
    rows: Ints,
    hidden: Floats,
    weight: Floats,
    tiles: Elements,
    own_tile: Elements,
) -> Elements:
    """Row tiles of the RMS-normed `rows` of hidden [T, hidden]. A single tile every thread makes
    for itself, which is sooner done than waiting for one of them."""
    num_rows = len(rows)
    if num_rows <= TILE:
        _norm_tile(shape, rows, hidden, weight, 0, own_tile)
        return own_tile
    items = num_tiles(num_rows)
    item = claim_alone(counters, region, thread, items)
    while item >= 0:
        _norm_tile(shape, rows, hidden, weight, item * TILE, tiles)
        complete(counters, region)
        item = claim_alone(counters, region, thread, items)
    return tiles


@kernel
def _norm_tile(
    shape: Shape, rows: Ints, hidden: Floats, weight: Floats, first: int, tiles: Elements
) -> None:
    width, num_rows = shape.hidden, min(TILE, len(rows) - first)
    height = height_of(num_rows)
    for row in range(num_rows):
        at = rows[first + row] * width
        squares = zeros()
        for column in range(0, width, LANES):
            x = load(hidden, at + column)
            squares = fma(x, x, squares)
        scale = splat(1.0 / math.sqrt(sum_lanes(squares) / width + shape.eps))
        into = first * width + row * shape.group
        for column in range(0, width, LANES):
            x = mul(mul(load(hidden, at + column), scale), load(weight, column))
            store_columns(tiles, into + column * height, height, x)


@kernel
def _panels_per_item(num_rows: int, num_panels: int) -> int:
    """An item takes some microseconds at the least."""
    if num_rows > _FEW_ROWS or num_panels <= 64:
        return 1
    return _MOST_PANELS if num_panels > 512 else 2


@kernel
def project(
    counters: Ints,
    region: int,
    thread: int,
    num_rows: int,
    x: Elements,
    panels: Elements,
    panels_at: int,
    num_in: int,
    num_out: int,
    bias: Floats,
    adds: bool,
    out: Floats,
    product: Floats,
) -> None:
    """out [num_rows, num_out] = (out, if `adds`) + x W + bias. x: row tiles of num_in columns;
    product: a thread's own, for PRODUCT floats."""
    num_panels = (num_out + PANEL - 1) // PANEL
    step = _panels_per_item(num_rows, num_panels)
    per_group = (num_panels + step - 1) // step
    items = per_group * ((num_rows + _GROUP_ROWS - 1) // _GROUP_ROWS)
    item = claim(counters, region, thread, items)
    while item >= 0:
        group, first_panel = item // per_group * _GROUP_ROWS, item % per_group * step
        end, end_panel = min(group + _GROUP_ROWS, num_rows), min(first_panel + step, num_panels)
        _multiply_all(
            x, group, end, panels, panels_at, first_panel, end_panel, num_in, num_rows, product
        )
        if commit(counters, thread):
            at = 0
            for panel in range(first_panel, end_panel):
                for row in range(group, end):
                    _put(product, at, bias, panel * PANEL, adds, out, row * num_out, num_out)
                    at += PANEL
            complete(counters, region)
        item = claim(counters, region, thread, items)


@kernel
def _multiply_all(
    x: Elements,
    first_row: int,
    end_row: int,
    panels: Elements,
    panels_at: int,
    first_panel: int,
    end_panel: int,
    num_in: int,
    num_rows: int,
    product: Floats,
) -> None:
    """product [panels][rows][PANEL], without gaps but for what a last tile has too much."""
    at = 0
    for panel in range(first_panel, end_panel):
        w_at = panels_at + panel * PANEL * num_in
        for first in range(first_row, end_row, TILE):
            rows = min(TILE, num_rows - first)
            multiply(height_of(rows), x, first * num_in, panels, w_at, num_in, product[at:])
            at += rows * PANEL


@kernel
def _put(
    product: Floats,
    at: int,
    bias: Floats,
    column: int,
    adds: bool,
    out: Floats,
    row_at: int,
    num_out: int,
) -> None:
    into = row_at + column
    if column + PANEL <= num_out:
        for i in range(0, PANEL, LANES):
            x = add(load(product, at + i), load(bias, column + i))
            if adds:
                x = add(x, load(out, into + i))
            store(out, into + i, x)
        return
    for i in range(num_out - column):
        before = out[into + i] if adds else 0.0
        out[into + i] = product[at + i] + bias[column + i] + before


@kernel
def project_gated(
    counters: Ints,
    region: int,
    thread: int,
    num_rows: int,
    x: Elements,
    panels: Elements,
    panels_at: int,
    num_in: int,
    num_out: int,
    bias: Floats,
    group_size: int,
    gated: Elements,
    product: Floats,
) -> None:
    """Row tiles of num_out columns: silu(x G) * (x U), where each panel holds 16 columns of G and
    the same 16 of U (SwiGLU: Shazeer, 2020)."""
    num_panels = num_out // LANES
    step = _panels_per_item(num_rows, num_panels)
    per_group = (num_panels + step - 1) // step
    items = per_group * ((num_rows + _GROUP_ROWS - 1) // _GROUP_ROWS)
    item = claim(counters, region, thread, items)
    while item >= 0:
        group, first_panel = item // per_group * _GROUP_ROWS, item % per_group * step
        end, end_panel = min(group + _GROUP_ROWS, num_rows), min(first_panel + step, num_panels)
        _multiply_all(
            x, group, end, panels, panels_at, first_panel, end_panel, num_in, num_rows, product
        )
        _gate(end - group, first_panel, end_panel, bias, product)
        if commit(counters, thread):
            at = 0
            for panel in range(first_panel, end_panel):
                for row in range(group, end):
                    tile = row // TILE * TILE
                    height = height_of(min(TILE, num_rows - tile))
                    into = tile * num_out + panel * LANES * height + (row - tile) * group_size
                    store_columns(gated, into, height, load(product, at))
                    at += PANEL
            complete(counters, region)
        item = claim(counters, region, thread, items)


@kernel
def _gate(num_rows: int, first_panel: int, end_panel: int, bias: Floats, product: Floats) -> None:
    """Each PANEL of the product begins with the values that the gate lets through."""
    at, one, zero = 0, splat(1.0), zeros()
    for panel in range(first_panel, end_panel):
        gate_bias, up_bias = load(bias, panel * PANEL), load(bias, panel * PANEL + LANES)
        for _ in range(num_rows):
            gate = add(load(product, at), gate_bias)
            up = add(load(product, at + LANES), up_bias)
            silu = div(gate, add(one, exp(sub(zero, gate))))
            store(product, at, mul(silu, up))
            at += PANEL
