"""How the threads of one step share its work, inside Numba functions.

A step is a row of regions, each of so many items. Every thread walks through all regions in order;
in each it claims items until none is left, and then waits until every item is done. So a region
may use what the one before it made, a thread that the scheduler took away holds up no more than the
item in its hands, and one that comes late skips what is over: nobody counts threads.

`counters` is int64, zeroed for each step, two cache lines a region (`COUNTERS_PER_REGION`).
"""

import platform
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from engine.cpu.jit import kernel
from engine.cpu.simd import I32, call, data_of

COUNTERS_PER_REGION = 32
_DONE = 16
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Atomically array[index] += value (int64); returns what was there."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(data_of(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.atomic_rmw("add", at, args[2], "acq_rel")

    return types.int64(array, types.intp, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def load_acquire(typing: Any, array: Any, index: Any) -> Any:
    """Atomically array[index] (int64); what was written before it was set is seen afterwards."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(data_of(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.load_atomic(at, "acquire", 8)

    return types.int64(array, types.intp), emit


@intrinsic  # type: ignore[untyped-decorator]
def _relax(typing: Any) -> Any:
    """Tells the core that this is a spin loop."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in _PAUSE:
            name, values = _PAUSE[platform.machine()]
            call(builder, name, ir.VoidType(), [ir.Constant(I32, value) for value in values])
        return context.get_dummy_value()

    return types.void(), emit


@kernel
def claim(counters: Any, region: int) -> int:
    """An item nobody else has; beyond the last one there is nothing left."""
    item: int = fetch_add(counters, region * COUNTERS_PER_REGION, 1)
    return item


@kernel
def complete(counters: Any, region: int) -> None:
    """A claimed item is done: whoever sees that sees all that it wrote."""
    fetch_add(counters, region * COUNTERS_PER_REGION + _DONE, 1)


@kernel
def wait(counters: Any, region: int, num_items: int) -> None:
    """Until all items of the region are done."""
    while load_acquire(counters, region * COUNTERS_PER_REGION + _DONE) < num_items:
        _relax()
