"""Comparisons of vectors (simd.py), for choosing tokens: lanes that pass are counted or kept."""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from engine.cpu.simd import I16, I64, V_F32, call, constant, operation, vector


@intrinsic  # type: ignore[untyped-decorator]
def any_within(typing: Any, x: Any, low: Any, high: Any) -> Any:
    """Whether some lane of x is at or above that of low and below that of high."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, low, high = args
        found = builder.and_(builder.fcmp_ordered(">=", x, low), builder.fcmp_ordered("<", x, high))
        return builder.icmp_unsigned("!=", builder.bitcast(found, I16), ir.Constant(I16, 0))

    return types.boolean(vector, vector, vector), emit


@intrinsic  # type: ignore[untyped-decorator]
def count_above(typing: Any, x: Any, y: Any) -> Any:
    """How many lanes of x are greater than those of y."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = builder.bitcast(builder.fcmp_ordered(">", *args), I16)
        return builder.zext(call(builder, "llvm.ctpop.i16", I16, [lanes]), I64)

    return types.int64(vector, vector), emit


def _emit_where_above(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), z, constant(V_F32, 0.0))


where_above = operation(3, _emit_where_above)
"""Lanes of z where x is greater than y, elsewhere 0."""


def _emit_where_at_least(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">=", x, y), z, constant(V_F32, 0.0))


where_at_least = operation(3, _emit_where_at_least)
"""Lanes of z where x is not less than y, elsewhere 0."""
