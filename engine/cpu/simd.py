"""Vectors inside Numba functions: sixteen float32 lanes, as one value that lives in a register.

Numba has no vector type; LLVM, which it compiles with, has. Each function here is a Numba
intrinsic: a few LLVM instructions, written into the function that calls it. LLVM lowers sixteen
lanes to whatever the CPU has; with AVX512-BF16 products of bfloat16 pairs are one instruction,
elsewhere two.

Arrays are flat and hold float32, or bfloat16 as uint16. `load` widens, `store` rounds to nearest
even. Indices are elements and are not checked.
"""

import math
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 16

_Emit = Callable[..., Any]
F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
V_F32, V_I16, V_I32 = (ir.VectorType(scalar, LANES) for scalar in (F32, I16, I32))

# Numba can be told to compile for another CPU (NUMBA_CPU_NAME): then only what every CPU has.
_FEATURES = {} if numba.config.CPU_NAME else llvmlite.binding.get_host_cpu_features()
_HAS_BF16_DOT = bool(_FEATURES.get("avx512bf16", False))
_HAS_SCALEF = bool(_FEATURES.get("avx512f", False))


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    intrinsic_name = "bf16"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")

    def _to_string(self) -> str:
        return "bfloat"


V_BF16 = ir.VectorType(_BFloat(), LANES)
_V_BF16_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name="f32x16")


vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, V_F32)


def data_of(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Pointer to an array's first element."""
    return cgutils.create_struct_proxy(array_type)(context, builder, array).data


def constant(vector_type: Any, value: float) -> Any:
    return ir.Constant(vector_type, [value] * LANES)


def call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Calls one of LLVM's own functions."""
    function = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), args)


def broadcast(builder: Any, scalar: Any, vector_type: Any) -> Any:
    undefined = ir.Constant(vector_type, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, constant(V_I32, 0))


def multiply_pairs(builder: Any, sums: Any, x: Any, y: Any) -> Any:
    """sums + x0 y0 + x1 y1 of sixteen pairs of bfloat16, each pair one 32-bit lane."""
    if _HAS_BF16_DOT:
        pairs = [builder.bitcast(operand, _V_BF16_PAIRS) for operand in (x, y)]
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", V_F32, [sums, *pairs])
    for half in (_low_half, _high_half):
        sums = call(builder, "llvm.fma.v16f32", V_F32, [half(builder, x), half(builder, y), sums])
    return sums


def widen(builder: Any, lanes: Any) -> Any:
    """Sixteen float32, from as many bfloat16 in 16-bit lanes; float32 stays as it is."""
    return lanes if lanes.type == V_F32 else _low_half(builder, builder.zext(lanes, V_I32))


def _low_half(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.shl(pairs, constant(V_I32, 16)), V_F32)


def _high_half(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.and_(pairs, constant(V_I32, 0xFFFF0000)), V_F32)


@intrinsic  # type: ignore[untyped-decorator]
def zeros(typing: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return constant(V_F32, 0.0)

    return vector(), emit


@intrinsic  # type: ignore[untyped-decorator]
def splat(typing: Any, x: Any) -> Any:
    """x in every lane."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return broadcast(builder, args[0], V_F32)

    return vector(types.float32), emit


@intrinsic  # type: ignore[untyped-decorator]
def load(typing: Any, array: Any, index: Any) -> Any:
    """Lanes array[index : index + 16]."""
    is_f32 = array.dtype == types.float32

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(data_of(context, builder, signature.args[0], args[0]), [args[1]])
        loaded = V_F32 if is_f32 else V_I16
        return widen(builder, builder.load(builder.bitcast(at, loaded.as_pointer()), align=2))

    return vector(array, types.intp), emit


@intrinsic  # type: ignore[untyped-decorator]
def store(typing: Any, array: Any, index: Any, x: Any) -> Any:
    """array[index : index + 16] = x"""
    is_f32 = array.dtype == types.float32

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(data_of(context, builder, signature.args[0], args[0]), [args[1]])
        if is_f32:
            builder.store(args[2], builder.bitcast(at, V_F32.as_pointer()), align=4)
        else:
            rounded = builder.fptrunc(args[2], V_BF16)
            builder.store(rounded, builder.bitcast(at, V_BF16.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), emit


@intrinsic  # type: ignore[untyped-decorator]
def store_columns(typing: Any, array: Any, index: Any, stride: Any, x: Any) -> Any:
    """Sixteen columns of one row of a row tile (see tile.py), the first even. float32: lane i
    goes to index + i * stride; bfloat16: lanes 2i and 2i + 1 go to index + 2 * i * stride."""
    is_f32 = array.dtype == types.float32

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = data_of(context, builder, signature.args[0], args[0])
        lanes, scalar = args[3], F32
        if not is_f32:
            lanes = builder.bitcast(builder.fptrunc(lanes, V_BF16), ir.VectorType(I32, LANES // 2))
            scalar = I32
        at = builder.bitcast(builder.gep(data, [args[1]]), scalar.as_pointer())
        for i in range(LANES if is_f32 else LANES // 2):
            element = builder.extract_element(lanes, ir.Constant(I32, i))
            builder.store(element, at, align=2)
            at = builder.gep(at, [args[2]])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, vector), emit


def ask_for(builder: Any, at: Any) -> None:
    """The cache line at the pointer is to come as near as the second cache: requests to the first
    one are so few at a time that they set the pace (docs/log.md)."""
    read_to_l2 = [ir.Constant(I32, 0), ir.Constant(I32, 2), ir.Constant(I32, 1)]
    at = builder.bitcast(at, ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [at, *read_to_l2])


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Asks for the cache line of array[index]."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = data_of(context, builder, signature.args[0], args[0])
        ask_for(builder, builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


def operation(arity: int, emit_one: _Emit) -> Any:
    """An intrinsic of `arity` vectors that gives a vector."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_one(builder, *args)

    if arity == 1:
        return intrinsic(lambda typing, x: (vector(vector), emit))
    if arity == 2:
        return intrinsic(lambda typing, x, y: (vector(vector, vector), emit))
    return intrinsic(lambda typing, x, y, z: (vector(vector, vector, vector), emit))


def _emit_exp(builder: Any, x: Any) -> Any:
    """Range reduction to [-ln 2 / 2, ln 2 / 2] and a polynomial of degree 6 (Taylor)."""

    def fma(a: Any, b: Any, c: Any) -> Any:
        return call(builder, "llvm.fma.v16f32", V_F32, [a, b, c])

    bounded = call(builder, "llvm.maxnum.v16f32", V_F32, [x, constant(V_F32, -110.0)])
    bounded = call(builder, "llvm.minnum.v16f32", V_F32, [bounded, constant(V_F32, 88.0)])
    scaled = builder.fmul(bounded, constant(V_F32, 1.4426950408889634))
    turns = call(builder, "llvm.nearbyint.v16f32", V_F32, [scaled])
    rest = fma(turns, constant(V_F32, -0.693145751953125), bounded)
    rest = fma(turns, constant(V_F32, -1.428606765330187e-06), rest)
    result = constant(V_F32, 1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        result = fma(result, rest, constant(V_F32, coefficient))
    return _scale_by_power(builder, result, turns)


def _emit_exp2(builder: Any, x: Any) -> Any:
    """As _emit_exp, with whole turns to begin with."""
    bounded = call(builder, "llvm.maxnum.v16f32", V_F32, [x, constant(V_F32, -160.0)])
    turns = call(builder, "llvm.nearbyint.v16f32", V_F32, [bounded])
    rest = builder.fsub(bounded, turns)
    terms = [math.log(2) ** n / math.factorial(n) for n in range(7)]
    result = constant(V_F32, terms[-1])
    for term in terms[-2::-1]:
        result = call(builder, "llvm.fma.v16f32", V_F32, [result, rest, constant(V_F32, term)])
    return _scale_by_power(builder, result, turns)


def _scale_by_power(builder: Any, x: Any, powers: Any) -> Any:
    """x * 2 ** powers, whole numbers from -159 on; what would be subnormal may be 0."""
    if _HAS_SCALEF:
        every_lane, rounding = ir.Constant(I16, -1), ir.Constant(I32, 4)
        args = [x, powers, constant(V_F32, 0.0), every_lane, rounding]
        return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", V_F32, args)
    is_zero = builder.fcmp_ordered("<", powers, constant(V_F32, -125.0))
    exponent = builder.shl(builder.fptosi(powers, V_I32), constant(V_I32, 23))
    scaled = builder.bitcast(builder.add(builder.bitcast(x, V_I32), exponent), V_F32)
    return builder.select(is_zero, constant(V_F32, 0.0), scaled)


add = operation(2, lambda builder, x, y: builder.fadd(x, y))
sub = operation(2, lambda builder, x, y: builder.fsub(x, y))
mul = operation(2, lambda builder, x, y: builder.fmul(x, y))
div = operation(2, lambda builder, x, y: builder.fdiv(x, y))
maximum = operation(2, lambda b, x, y: call(b, "llvm.maxnum.v16f32", V_F32, [x, y]))
fma = operation(3, lambda b, x, y, z: call(b, "llvm.fma.v16f32", V_F32, [x, y, z]))
exp = operation(1, _emit_exp)
"""Relative error about 2e-7; exactly 0 far below -87."""
exp2 = operation(1, _emit_exp2)
"""Of 120 at most; relative error about 2e-7; exactly 0 far below -126."""


@intrinsic  # type: ignore[untyped-decorator]
def any_above(typing: Any, x: Any, y: Any) -> Any:
    """Whether some lane of x is greater than that of y."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = builder.bitcast(builder.fcmp_ordered(">", *args), I16)
        return builder.icmp_unsigned("!=", lanes, ir.Constant(I16, 0))

    return types.boolean(vector, vector), emit


def _reduction(combine: _Emit) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = args[0]
        for distance in (8, 4, 2, 1):
            rotated = [(lane + distance) % LANES for lane in range(LANES)]
            lanes = combine(
                builder, lanes, builder.shuffle_vector(lanes, lanes, ir.Constant(V_I32, rotated))
            )
        return builder.extract_element(lanes, ir.Constant(I32, 0))

    return intrinsic(lambda typing, x: (types.float32(vector), emit))


sum_lanes = _reduction(lambda builder, x, y: builder.fadd(x, y))
max_lanes = _reduction(lambda b, x, y: call(b, "llvm.maxnum.v16f32", V_F32, [x, y]))
