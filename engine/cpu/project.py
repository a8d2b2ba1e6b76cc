"""Row-wise work of a layer: norms, and the products with what follows each of them fused in.

Kernels; each is one region of a step (see sync.py).
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
from engine.cpu.sync import claim, complete, wait
from engine.cpu.tile import PANEL, TILE, height_of, multiply

_GROUP_ROWS = 12 * TILE
"""Rows whose tiles stay in the core's cache while panels pass by."""


@kernel
def num_tiles(num_rows: int) -> int:
    return (num_rows + TILE - 1) // TILE


@kernel
def embed(
    counters: Ints, region: int, shape: Shape, ids: Ints, table: Elements, hidden: Floats
) -> None:
    """hidden [T, hidden] = the tokens' rows of the table."""
    width, flat = shape.hidden, table.reshape(-1)
    items = num_tiles(len(ids))
    item = claim(counters, region)
    while item < items:
        for row in range(item * TILE, min((item + 1) * TILE, len(ids))):
            for column in range(0, width, LANES):
                store(hidden, row * width + column, load(flat, ids[row] * width + column))
        complete(counters, region)
        item = claim(counters, region)
    wait(counters, region, items)


@kernel
def norm(
    counters: Ints,
    region: int,
    shape: Shape,
    rows: Ints,
    hidden: Floats,
    weight: Floats,
    tiles: Elements,
) -> None:
    """Row tiles of the RMS-normed `rows` of hidden [T, hidden]."""
    width, num_rows = shape.hidden, len(rows)
    items = num_tiles(num_rows)
    item = claim(counters, region)
    while item < items:
        first = item * TILE
        height = height_of(min(TILE, num_rows - first))
        for row in range(min(TILE, num_rows - first)):
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
        complete(counters, region)
        item = claim(counters, region)
    wait(counters, region, items)


@kernel
def _panels_per_item(num_rows: int, num_panels: int) -> int:
    """An item takes some microseconds at the least."""
    if num_rows > 2 * TILE:
        return 1
    return 8 if num_panels > 512 else 2


@kernel
def project(
    counters: Ints,
    region: int,
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
    product: a thread's own [TILE, PANEL]."""
    num_panels = (num_out + PANEL - 1) // PANEL
    step = _panels_per_item(num_rows, num_panels)
    per_group = (num_panels + step - 1) // step
    items = per_group * ((num_rows + _GROUP_ROWS - 1) // _GROUP_ROWS)
    item = claim(counters, region)
    while item < items:
        group, first_panel = item // per_group * _GROUP_ROWS, item % per_group * step
        for panel in range(first_panel, min(first_panel + step, num_panels)):
            column, w_at = panel * PANEL, panels_at + panel * PANEL * num_in
            for first in range(group, min(group + _GROUP_ROWS, num_rows), TILE):
                rows = min(TILE, num_rows - first)
                multiply(height_of(rows), x, first * num_in, panels, w_at, num_in, product)
                for row in range(rows):
                    at = (first + row) * num_out + column
                    if column + PANEL <= num_out:
                        _put(product, row * PANEL, bias, column, adds, out, at)
                        _put(
                            product,
                            row * PANEL + LANES,
                            bias,
                            column + LANES,
                            adds,
                            out,
                            at + LANES,
                        )
                    else:
                        for i in range(num_out - column):
                            before = out[at + i] if adds else 0.0
                            out[at + i] = product[row * PANEL + i] + bias[column + i] + before
        complete(counters, region)
        item = claim(counters, region)
    wait(counters, region, items)


@kernel
def _put(
    product: Floats, i: int, bias: Floats, column: int, adds: bool, out: Floats, at: int
) -> None:
    x = add(load(product, i), load(bias, column))
    if adds:
        x = add(x, load(out, at))
    store(out, at, x)


@kernel
def project_gated(
    counters: Ints,
    region: int,
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
    one, zero = splat(1.0), zeros()
    item = claim(counters, region)
    while item < items:
        group, first_panel = item // per_group * _GROUP_ROWS, item % per_group * step
        for panel in range(first_panel, min(first_panel + step, num_panels)):
            w_at = panels_at + panel * PANEL * num_in
            for first in range(group, min(group + _GROUP_ROWS, num_rows), TILE):
                rows = min(TILE, num_rows - first)
                height = height_of(rows)
                multiply(height, x, first * num_in, panels, w_at, num_in, product)
                into = first * num_out + panel * LANES * height
                for row in range(rows):
                    gate = add(load(product, row * PANEL), load(bias, panel * PANEL))
                    up = load(product, row * PANEL + LANES)
                    up = add(up, load(bias, panel * PANEL + LANES))
                    silu = div(gate, add(one, exp(sub(zero, gate))))
                    store_columns(gated, into + row * group_size, height, mul(silu, up))
        complete(counters, region)
        item = claim(counters, region)
    wait(counters, region, items)
