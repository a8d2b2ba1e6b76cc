"""Products with rows that lie anywhere: keys and values of a sequence, block by block.

Numba intrinsics, as in simd.py; `offsets` says at which element each row begins.
"""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from engine.cpu.jit import kernel
from engine.cpu.simd import (
    I64,
    LANES,
    V_F32,
    V_I16,
    V_I32,
    broadcast,
    call,
    constant,
    data_of,
    multiply_pairs,
    vector,
    widen,
)

_MAX_HEADS = 4


class _Loop:
    """`for index in range(0, end, step)` with values carried from turn to turn."""

    def __init__(self, builder: Any, end: Any, step: int, carried: list[Any]) -> None:
        self._builder, self._step = builder, step
        before = builder.block
        self._body = builder.append_basic_block("loop")
        self._exit = builder.append_basic_block("loop.end")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(I64)
        self.index.add_incoming(ir.Constant(I64, 0), before)
        self.values = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.values, carried, strict=True):
            phi.add_incoming(value, before)
        self._end = end

    def close(self, values: list[Any]) -> None:
        """Ends the body; goes on behind the loop, where `values` are the last ones."""
        builder = self._builder
        following = builder.add(self.index, ir.Constant(I64, self._step))
        self.index.add_incoming(following, builder.block)
        for phi, value in zip(self.values, values, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, self._end), self._body, self._exit)
        builder.position_at_end(self._exit)


@intrinsic  # type: ignore[untyped-decorator]
def dot_rows(
    typing: Any, x: Any, x_at: Any, rows: Any, rows_at: Any, offsets: Any, first: Any, dim: Any
) -> Any:
    """Lane i = x[x_at : x_at + dim] . rows[rows_at + offsets[first + i] :][:dim], sixteen rows."""
    is_f32 = x.dtype == types.float32
    loaded, per_step = (V_F32, LANES) if is_f32 else (V_I32, 2 * LANES)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, rows, offsets = (
            data_of(context, builder, signature.args[i], args[i]) for i in (0, 2, 4)
        )
        rows = builder.gep(rows, [args[3]])

        def load_at(data: Any, index: Any) -> Any:
            at = builder.bitcast(builder.gep(data, [index]), loaded.as_pointer())
            return builder.load(at, align=2)

        starts = [
            builder.load(builder.gep(offsets, [builder.add(args[5], ir.Constant(I64, i))]))
            for i in range(LANES)
        ]
        loop = _Loop(builder, args[6], per_step, [constant(V_F32, 0.0)] * LANES)
        query = load_at(x, builder.add(args[1], loop.index))
        sums = []
        for start, total in zip(starts, loop.values, strict=True):
            row = load_at(rows, builder.add(start, loop.index))
            sums.append(
                call(builder, "llvm.fma.v16f32", V_F32, [query, row, total])
                if is_f32
                else multiply_pairs(builder, total, query, row)
            )
        loop.close(sums)
        return _sum_each(builder, sums)

    index = types.intp
    return vector(x, index, rows, index, offsets, index, index), emit


def _sum_each(builder: Any, rows: list[Any]) -> Any:
    """Lane i = the sum of the lanes of rows[i]: four times, two vectors become one that holds half
    as many partial sums of twice as many rows. That leaves them in bit-reversed order."""
    level = [rows[int(f"{i:04b}"[::-1], 2)] for i in range(LANES)]
    width = LANES
    while width > 1:
        half = width // 2
        low = [g * width + i for g in range(2 * LANES // width) for i in range(half)]
        masks = [ir.Constant(V_I32, [i + offset for i in low]) for offset in (0, half)]
        pairs = [(level[i], level[i + len(level) // 2]) for i in range(len(level) // 2)]
        level = [
            builder.fadd(*(builder.shuffle_vector(x, y, mask) for mask in masks)) for x, y in pairs
        ]
        width = half
    return level[0]


def _add_rows_of(num_heads: int) -> Any:
    def add_rows(
        typing: Any,
        weights: Any,
        weights_at: Any,
        stride: Any,
        rows: Any,
        offsets: Any,
        column: Any,
        count: Any,
        sums: Any,
        sums_at: Any,
        dim: Any,
    ) -> Any:
        is_f32 = rows.dtype == types.float32
        loaded = V_F32 if is_f32 else V_I16

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, rows, offsets, sums = (
                data_of(context, builder, signature.args[i], args[i]) for i in (0, 3, 4, 7)
            )
            weights_at, stride, column, count, sums_at, dim = (args[i] for i in (1, 2, 5, 6, 8, 9))

            def places() -> list[Any]:
                head_at, result = sums_at, []
                for _ in range(num_heads):
                    at = builder.bitcast(builder.gep(sums, [head_at]), V_F32.as_pointer())
                    result += [at, builder.gep(at, [ir.Constant(I64, 1)])]
                    head_at = builder.add(head_at, dim)
                return result

            into = places()
            loop = _Loop(builder, count, 1, [builder.load(at, align=4) for at in into])
            start = builder.load(builder.gep(offsets, [loop.index]))
            at = builder.gep(rows, [builder.add(start, column)])
            at = builder.bitcast(at, loaded.as_pointer())
            values = [
                widen(builder, builder.load(builder.gep(at, [ir.Constant(I64, v)]), align=2))
                for v in range(2)
            ]
            after, weight_at = [], builder.add(weights_at, loop.index)
            for head in range(num_heads):
                weight = builder.load(builder.gep(weights, [weight_at]), align=4)
                lanes = broadcast(builder, weight, V_F32)
                for value, total in zip(values, loop.values[2 * head :][:2], strict=True):
                    after.append(call(builder, "llvm.fma.v16f32", V_F32, [lanes, value, total]))
                weight_at = builder.add(weight_at, stride)
            loop.close(after)
            for value, at in zip(after, into, strict=True):
                builder.store(value, at, align=4)
            return context.get_dummy_value()

        index = types.intp
        arguments = (weights, index, index, rows, offsets, index, index, sums, index, index)
        return types.void(*arguments), emit

    return intrinsic(add_rows)


_add_rows_1, _add_rows_2, _add_rows_3, _add_rows_4 = map(_add_rows_of, range(1, _MAX_HEADS + 1))


@kernel
def add_rows(
    num_heads: int,
    weights: Any,
    stride: int,
    rows: Any,
    rows_at: int,
    offsets: Any,
    count: int,
    sums: Any,
    dim: int,
) -> None:
    """sums [num_heads, dim] += weights [num_heads, stride][:, :count] times the rows that begin at
    rows_at + offsets. Rows are widened once for up to four heads."""
    for first in range(0, dim, 2 * LANES):
        column, head = rows_at + first, 0
        while head < num_heads:
            left, at, into = num_heads - head, head * stride, head * dim + first
            if left >= 4:
                _add_rows_4(weights, at, stride, rows, offsets, column, count, sums, into, dim)
            elif left == 3:
                _add_rows_3(weights, at, stride, rows, offsets, column, count, sums, into, dim)
            elif left == 2:
                _add_rows_2(weights, at, stride, rows, offsets, column, count, sums, into, dim)
            else:
                _add_rows_1(weights, at, stride, rows, offsets, column, count, sums, into, dim)
            head += 4
