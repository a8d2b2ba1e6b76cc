"""The matrix product in registers: a few rows times a panel of columns.

    rows     x[tile] [K / e][height][e]      e elements side by side: 2 bfloat16, or 1 float32
             or, for `add_weighted`, [height][64]
    columns  w[panel] [K / e][32][e]
    result   [height][32] float32

Both operands lie in the order in which they are read, so that the inner loop is a load for each
16 columns, a broadcast for each row and a product for each pair of them: up to 24 sums stay in
registers (BLIS: Van Zee and van de Geijn, 2015). A row's sum is added up in the order of K whatever
the height, so it is the same bit for bit whatever rows are beside it.
"""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from engine.cpu.jit import kernel
from engine.cpu.layout import KEYS
from engine.cpu.simd import (
    F32,
    I32,
    I64,
    LANES,
    V_F32,
    V_I32,
    ask_for,
    broadcast,
    call,
    constant,
    data_of,
    multiply_pairs,
)

PANEL = 2 * LANES
"""Columns of a panel."""
TILE = 12
"""Rows of a tile; the last one of a matrix may have fewer."""
_VECTORS = PANEL // LANES
_LINE_BYTES = 64
_AHEAD_BYTES = {8: 12288, 12: 12288}
"""How far ahead a panel is asked for, by the height of the tile, into the second cache. With fewer
rows the CPU's own prefetchers are as good, and better left alone (docs/log.md)."""


def _emit_product(
    builder: Any,
    is_f32: bool,
    x: Any,
    strides: tuple[int, int],
    w: Any,
    count: Any,
    start: list[list[Any]],
    ahead: int = 0,
) -> Any:
    """The loop over K; x, w point at the tile and the panel; strides of x from k to k and from row
    to row, in groups of elements. Returns [height][2] sums, which begin as `start`. What is `ahead`
    bytes further in w is asked for."""
    height = len(start)
    element, loaded = (F32, V_F32) if is_f32 else (I32, V_I32)
    x = builder.bitcast(x, element.as_pointer())
    w = builder.bitcast(w, loaded.as_pointer())
    before = builder.block
    loop, end = builder.append_basic_block("k"), builder.append_basic_block("k.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(I64)
    k.add_incoming(ir.Constant(I64, 0), before)
    sums = [[builder.phi(V_F32) for _ in range(_VECTORS)] for _ in range(height)]
    x_at, w_at = (builder.mul(k, ir.Constant(I64, n)) for n in (strides[0], _VECTORS))
    columns = [
        builder.load(builder.gep(w, [builder.add(w_at, ir.Constant(I64, v))]), align=2)
        for v in range(_VECTORS)
    ]
    for v in range(_VECTORS if ahead else 0):
        line = builder.add(w_at, ir.Constant(I64, v + ahead // _LINE_BYTES))
        ask_for(builder, builder.gep(w, [line]))
    after = []
    for row in range(height):
        scalar = builder.load(
            builder.gep(x, [builder.add(x_at, ir.Constant(I64, row * strides[1]))]), align=2
        )
        lanes = broadcast(builder, scalar, loaded)
        after.append(
            [
                call(builder, "llvm.fma.v16f32", V_F32, [lanes, column, total])
                if is_f32
                else multiply_pairs(builder, total, lanes, column)
                for column, total in zip(columns, sums[row], strict=True)
            ]
        )
    following = builder.add(k, ir.Constant(I64, 1))
    k.add_incoming(following, loop)
    for row_start, row_before in zip(start, sums, strict=True):
        for first, total in zip(row_start, row_before, strict=True):
            total.add_incoming(first, before)
    for row_before, row_after in zip(sums, after, strict=True):
        for total, result in zip(row_before, row_after, strict=True):
            total.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, end)
    builder.position_at_end(end)
    return after


def _product_of(height: int) -> Any:
    """Of a row tile."""

    def product(typing: Any, x: Any, x_at: Any, w: Any, w_at: Any, num_in: Any, out: Any) -> Any:
        is_f32 = x.dtype == types.float32

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, w, out = (data_of(context, builder, signature.args[i], args[i]) for i in (0, 2, 5))
            x, w = builder.gep(x, [args[1]]), builder.gep(w, [args[3]])
            count = builder.udiv(args[4], ir.Constant(I64, 1 if is_f32 else 2))
            start = [[constant(V_F32, 0.0)] * _VECTORS for _ in range(height)]
            ahead = _AHEAD_BYTES.get(height, 0)
            sums = _emit_product(builder, is_f32, x, (height, 1), w, count, start, ahead)
            at = builder.bitcast(out, V_F32.as_pointer())
            for index, lanes in enumerate(lanes for row in sums for lanes in row):
                builder.store(lanes, builder.gep(at, [ir.Constant(I64, index)]), align=4)
            return context.get_dummy_value()

        index = types.intp
        return types.void(x, index, w, index, index, out), emit

    return intrinsic(product)


def _weights_of(height: int) -> Any:
    """Of [height][KEYS], added to rows that lie `stride` apart."""

    def add_product(typing: Any, x: Any, w: Any, w_at: Any, sums: Any, at: Any, stride: Any) -> Any:
        is_f32 = x.dtype == types.float32
        group = 1 if is_f32 else 2

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, w, sums = (data_of(context, builder, signature.args[i], args[i]) for i in (0, 1, 3))
            into, row_at = [], args[4]
            for _ in range(height):
                row = builder.bitcast(builder.gep(sums, [row_at]), V_F32.as_pointer())
                into.append([builder.gep(row, [ir.Constant(I64, v)]) for v in range(_VECTORS)])
                row_at = builder.add(row_at, args[5])
            start = [[builder.load(at, align=4) for at in row] for row in into]
            strides, count = (1, KEYS // group), ir.Constant(I64, KEYS // group)
            w = builder.gep(w, [args[2]])
            after = _emit_product(builder, is_f32, x, strides, w, count, start)
            for row, ats in zip(after, into, strict=True):
                for lanes, at in zip(row, ats, strict=True):
                    builder.store(lanes, at, align=4)
            return context.get_dummy_value()

        index = types.intp
        return types.void(x, w, index, sums, index, index), emit

    return intrinsic(add_product)


_HEIGHTS = (1, 2, 4, 8, 12)
_product_1, _product_2, _product_4, _product_8, _product_12 = map(_product_of, _HEIGHTS)
_weights_1, _weights_2, _weights_4, _weights_8, _weights_12 = map(_weights_of, _HEIGHTS)


@kernel
def multiply(height: int, x: Any, x_at: int, w: Any, w_at: int, num_in: int, out: Any) -> None:
    """out [height, 32] float32 = the tile at x_at (`height` rows, see `height_of`) times the panel
    at w_at. num_in, the K above, is at least 1, and even for bfloat16."""
    if height == 12:
        _product_12(x, x_at, w, w_at, num_in, out)
    elif height == 8:
        _product_8(x, x_at, w, w_at, num_in, out)
    elif height == 4:
        _product_4(x, x_at, w, w_at, num_in, out)
    elif height == 2:
        _product_2(x, x_at, w, w_at, num_in, out)
    else:
        _product_1(x, x_at, w, w_at, num_in, out)


@kernel
def add_weighted(
    height: int, x: Any, w: Any, w_at: int, sums: Any, sums_at: int, stride: int
) -> None:
    """sums [height, stride][:, :32], from sums_at on, += x [height, KEYS] times the panel of KEYS
    rows at w_at."""
    if height == 12:
        _weights_12(x, w, w_at, sums, sums_at, stride)
    elif height == 8:
        _weights_8(x, w, w_at, sums, sums_at, stride)
    elif height == 4:
        _weights_4(x, w, w_at, sums, sums_at, stride)
    elif height == 2:
        _weights_2(x, w, w_at, sums, sums_at, stride)
    else:
        _weights_1(x, w, w_at, sums, sums_at, stride)


@kernel
def height_of(num_rows: int) -> int:
    """Rows of the smallest tile for so many; what is more is computed and not used."""
    if num_rows > 8:
        return 12
    if num_rows > 4:
        return 8
    return num_rows if num_rows <= 2 else 4
