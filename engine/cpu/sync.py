"""How the threads of one step share its work, inside Numba functions.

A step is a row of regions, each of so many items. Every thread walks through all regions in order;
in each it claims items until all are done. So a region may use what the one before it made, and one
that comes late skips what is over: nobody counts threads.

    item = claim(counters, region, thread, items)
    while item >= 0:
        ...                             # computed into memory of the thread's own
        if commit(counters, thread):
            ...                         # written to where all see it
            complete(counters, region)
        item = claim(counters, region, thread, items)

The items of a region are cut into one range a thread: each streams through its own, and then takes
what is left of the others'. With none left, `claim` waits; and when that takes longer than an item
should, it hands out an item that another thread has claimed and not done, for the scheduler may
have taken that thread away. Of all that compute an item, one gets True from `commit`, and only
that one may write, so a region may also add to what is there. Who comes late reads memory that
others write by now, and throws away what it made of it. A thread that is taken away between
`commit` and `complete` does hold up the others, so little should stand there.

For short items there is `claim_alone`: no commit, nobody helps.
"""

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from engine.cpu.jit import kernel
from engine.cpu.layout import Ints
from engine.cpu.simd import I32, I64, call, data_of

_LINE = 8
"""Words of a cache line. `counters` is one line that begins with the number of threads, a line a
thread, and for each region a line of what is done and one a thread of what is claimed."""
_HELD, _FROM, _WORD, _SINCE = 0, 1, 2, 3
"""In a thread's line: the item it has claimed and nobody has committed, or 0; whose item it is
computing, and which; when it began."""
_REGION_BITS = 32
_PATIENCE = 20_000
"""Ticks that a thread waits before it helps, if it has nothing to judge by."""
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}


def new_counters(num_regions: int, num_threads: int) -> Ints:
    """For one step."""
    lines = 1 + num_threads + num_regions * (1 + num_threads)
    counters: Ints = np.zeros(lines * _LINE, dtype=np.int64)
    counters[0] = num_threads
    return counters


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Atomically array[index] += value (int64); returns what was there."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(data_of(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.atomic_rmw("add", at, args[2], "acq_rel")

    return types.int64(array, types.intp, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _exchange(typing: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:
    """Atomically array[index] = value (int64) if it is `expected`; whether it was."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(data_of(context, builder, signature.args[0], args[0]), [args[1]])
        result = builder.cmpxchg(at, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(result, 1)

    return types.boolean(array, types.intp, types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def load_acquire(typing: Any, array: Any, index: Any) -> Any:
    """Atomically array[index] (int64); what was written before it was set is seen afterwards."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(data_of(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.load_atomic(at, "acquire", 8)

    return types.int64(array, types.intp), emit


@intrinsic  # type: ignore[untyped-decorator]
def _store_release(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Atomically array[index] = value (int64)."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(data_of(context, builder, signature.args[0], args[0]), [args[1]])
        builder.store_atomic(args[2], at, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _relax(typing: Any) -> Any:
    """Tells the core that this is a spin loop."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in _PAUSE:
            name, values = _PAUSE[platform.machine()]
            call(builder, name, ir.VoidType(), [ir.Constant(I32, value) for value in values])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic  # type: ignore[untyped-decorator]
def _ticks(typing: Any) -> Any:
    """A clock of a steady rate; 0 on CPUs where it is not known how to read one."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            return call(builder, "llvm.readcyclecounter", I64, [])
        if platform.machine() == "aarch64":
            read = ir.FunctionType(I64, [])
            return builder.asm(read, "mrs $0, cntvct_el0", "=r", [], side_effect=True)
        return ir.Constant(I64, 0)

    return types.int64(), emit


@kernel
def _done_at(counters: Ints, region: int) -> int:
    threads = counters[0]
    at: int = (1 + threads + region * (1 + threads)) * _LINE
    return at


@kernel
def first_of(counters: Ints, thread: int, items: int) -> int:
    """Where the range of a thread begins; that of the last thread ends at first_of(threads)."""
    threads = counters[0]
    return int((thread * items + threads - 1) // threads)


@kernel
def _take(counters: Ints, done_at: int, thread: int, items: int) -> int:
    """An item nobody has claimed, or -1."""
    threads = counters[0]
    for i in range(threads):
        owner = (thread + i) % threads
        first = first_of(counters, owner, items)
        num = first_of(counters, owner + 1, items) - first
        at = done_at + (1 + owner) * _LINE
        if load_acquire(counters, at) < num:
            item = fetch_add(counters, at, 1)
            if item < num:
                return int(first + item)
    return -1


@kernel
def _held_by_another(counters: Ints, region: int, thread: int) -> int:
    """An item of the region that another has claimed and nobody has committed, or -1."""
    threads = counters[0]
    for i in range(1, threads):
        other = (thread + i) % threads
        word = load_acquire(counters, (1 + other) * _LINE + _HELD)
        if word and word >> _REGION_BITS == region:
            own = (1 + thread) * _LINE
            counters[own + _FROM], counters[own + _WORD] = other, word
            return int((word & ((1 << _REGION_BITS) - 1)) - 1)
    return -1


@kernel
def claim(counters: Ints, region: int, thread: int, items: int) -> int:
    """An item to compute; -1 when all are done. See the module."""
    done_at, own, now = _done_at(counters, region), (1 + thread) * _LINE, _ticks()
    began = counters[own + _SINCE]
    if load_acquire(counters, done_at) < items:
        item = _take(counters, done_at, thread, items)
        if item >= 0:
            word = (region << _REGION_BITS) + item + 1
            counters[own + _FROM], counters[own + _WORD] = thread, word
            counters[own + _SINCE] = now
            _store_release(counters, own + _HELD, word)
            return item
        # As long as its own last item took: then the others' should be done.
        patience = now - began if began else _PATIENCE
        while load_acquire(counters, done_at) < items:
            _relax()
            if _ticks() - now > patience:
                item = _held_by_another(counters, region, thread)
                if item >= 0:
                    counters[own + _SINCE] = _ticks()
                    return item
    counters[own + _SINCE] = 0
    return -1


@kernel
def commit(counters: Ints, thread: int) -> bool:
    """Whether what was made of the claimed item is what counts: at most once an item."""
    own = (1 + thread) * _LINE
    held_at, word = (1 + counters[own + _FROM]) * _LINE + _HELD, counters[own + _WORD]
    first: bool = _exchange(counters, held_at, word, 0)
    return first


@kernel
def claim_alone(counters: Ints, region: int, thread: int, items: int) -> int:
    """An item that nobody else gets; -1 when all are done. No `commit`."""
    done_at = _done_at(counters, region)
    if load_acquire(counters, done_at) < items:
        item = _take(counters, done_at, thread, items)
        if item >= 0:
            return item
        while load_acquire(counters, done_at) < items:
            _relax()
    return -1


@kernel
def complete(counters: Ints, region: int) -> None:
    """An item is done: whoever sees that sees all that was written of it."""
    fetch_add(counters, _done_at(counters, region), 1)
