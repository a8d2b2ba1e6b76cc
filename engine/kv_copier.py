"""Copies KV between the pool and staging memory, beside the steps and never in one.

One thread, and on CUDA one stream; copies run in the order they were asked for. Any thread may
ask. Life of a copy:

1. `gather` or `scatter` queues it and returns a future.
2. The copier's thread enters the lease; a lease that is closed by then fails the future with
   LeaseClosed, and nothing was touched. Whoever asks may have entered it already (`is_entered`):
   then the copy comes about even if the lease was closed since.
3. CUDA: it waits, on its stream, for the forward pass that `record_compute` last marked when it
   was asked for: a gather for what it reads, a scatter because a block may have changed hands
   while that pass still writes it. The CPU needs no order: what is computed is computed.
4. The copy is done on the device; the lease is left; the future resolves to its nanoseconds.
5. CUDA: `wait_scatters` makes the next forward pass wait, on its stream, for what was scattered.

`close` completes what was asked for; after it, asking fails with EngineStopped.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.codec_choice import CodecPolicy
from engine.errors import EngineStopped
from engine.kv_cache import KVCache, KVRange
from engine.kv_codec import Codec, decode, encode, measured
from engine.kv_lease import CopyLease, KVLease
from engine.thread_priority import lower_priority


class Encoded(NamedTuple):
    """What became of a payload."""

    nbytes: int
    codec: Codec
    """RAW too if one was tried and gained nothing."""


_T = TypeVar("_T")
_Copy = Callable[[Sequence[int], KVRange, Tensor], None]


class KVCopier:
    """See the module."""

    def __init__(self, kv: KVCache, nice: int = 0) -> None:
        """`nice` of its thread; the engine's own is right: what a burst of transfers copies then
        shares the cores with the steps instead of going before them."""
        self._kv = kv
        self._on_cuda = kv.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        if self._on_cuda:
            self._stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self._codecs: CodecPolicy | None = None  # measured when it may first matter
        self._raw = torch.empty(0, dtype=torch.uint8)
        self.busy_s = 0.0
        """CPU seconds that its thread has spent on copies."""
        self._computed: torch.cuda.Event | None = None
        self._copied: torch.cuda.Event | None = None
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="kv-copier", initializer=lower_priority, initargs=(nice,)
        )

    def gather(
        self, lease: CopyLease, part: KVRange, out: memoryview, *, is_entered: bool = False
    ) -> Future[int]:
        """The range's payload into `out`, which has its size exactly; see KVCache for layouts.
        `out` is the caller's again when the future is done, or was cancelled in time."""
        return self._submit(self._gather, lease, part, out, is_entered, self._computed)

    def scatter(
        self,
        lease: CopyLease,
        part: KVRange,
        payload: memoryview,
        skip: int = 0,
        *,
        is_entered: bool = False,
        codec: Codec = Codec.RAW,
    ) -> Future[int]:
        """A payload into the range's blocks, but for its first `skip` tokens; the rest as for
        `gather`. One that its codec did not make fails with BadPayload, and nothing is touched."""
        computed = self._computed
        return self._submit(self._scatter, lease, part, payload, is_entered, computed, skip, codec)

    def pack(
        self,
        lease: KVLease,
        part: KVRange,
        out: memoryview,
        codecs: Sequence[int],
        link_nbytes_per_s: float | None,
    ) -> Future[Encoded]:
        """As `gather`; by whichever of the `codecs`, if any, brings it soonest over a link of that
        speed (engine/codec_choice.py). `out` has the raw payload's size."""
        computed, link = self._computed, link_nbytes_per_s
        return self._submit(self._pack, lease, part, out, codecs, link, computed)

    def allocate_staging(self, nbytes: int) -> memoryview:
        """Writable bytes that copies are fast from and to: pinned for CUDA; every page is there."""
        staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._on_cuda).zero_()
        memory: memoryview = staging.numpy().data  # host memory
        return memory

    def allocate_payload(self, nbytes: int) -> memoryview:
        """As `allocate_staging`, for a copy now and then: pages come as they are written."""
        payload = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._on_cuda)
        memory: memoryview = payload.numpy().data  # host memory
        return memory

    def payload_nbytes(self, part: KVRange) -> int:
        """Of the range's payload."""
        return self._kv.payload_nbytes(part)

    def record_compute(self) -> None:
        """Engine thread, after each forward pass: gathers asked for from now on wait for it."""
        if self._on_cuda:
            self._computed = torch.cuda.current_stream(self._kv.device).record_event()

    def wait_scatters(self, lease: KVLease) -> None:
        """Engine thread: the next forward pass sees what was scattered under `lease`. (Copies are
        in order, so waiting for the last one of all covers it.)"""
        if self._copied is not None:
            torch.cuda.current_stream(self._kv.device).wait_event(self._copied)

    def close(self) -> None:
        """Blocks until every copy asked for is done."""
        self._thread.shutdown(wait=True)

    def _submit(self, copy: Callable[..., _T], *args: object) -> Future[_T]:
        try:
            return self._thread.submit(self._counted, copy, *args)
        except RuntimeError as error:  # what an executor says after shutdown
            raise EngineStopped("the KV copier is closed") from error

    def _counted(self, copy: Callable[..., _T], *args: object) -> _T:
        began_s = time.thread_time()
        try:
            return copy(*args)
        finally:
            self.busy_s += time.thread_time() - began_s

    def _gather(
        self,
        lease: CopyLease,
        part: KVRange,
        out: memoryview,
        is_entered: bool,
        computed: torch.cuda.Event | None,
    ) -> int:
        return self._timed(self._kv.gather, lease, part, out, is_entered, computed)

    def _scatter(
        self,
        lease: CopyLease,
        part: KVRange,
        payload: memoryview,
        is_entered: bool,
        computed: torch.cuda.Event | None,
        skip: int,
        codec: Codec,
    ) -> int:
        copy = partial(self._kv.scatter, skip=skip)
        if codec is Codec.RAW:
            return self._timed(copy, lease, part, payload, is_entered, computed)
        began_ns = time.perf_counter_ns()
        raw = self._room_for(self._kv.payload_nbytes(part))
        decode(codec, _uint8(payload), self._kv.data.dtype, self._kv.data.shape[-1], raw)
        self._timed(copy, lease, part, raw.numpy().data, is_entered, computed)  # host memory
        return time.perf_counter_ns() - began_ns

    def _pack(
        self,
        lease: KVLease,
        part: KVRange,
        out: memoryview,
        codecs: Sequence[int],
        link_nbytes_per_s: float | None,
        computed: torch.cuda.Event | None,
    ) -> Encoded:
        codec = self._choose(codecs, link_nbytes_per_s)
        if codec is Codec.RAW:
            self._timed(self._kv.gather, lease, part, out, False, computed)
            return Encoded(len(out), codec)
        raw = self._room_for(self._kv.payload_nbytes(part))
        self._timed(self._kv.gather, lease, part, raw.numpy().data, False, computed)  # host memory
        began = time.perf_counter()
        nbytes = encode(codec, raw, self._kv.data.dtype, self._kv.data.shape[-1], _uint8(out))
        seconds = time.perf_counter() - began
        assert self._codecs is not None
        self._codecs.learn(codec, len(raw), nbytes or len(raw), seconds)
        if nbytes is None:
            _uint8(out).copy_(raw)
            return Encoded(len(raw), Codec.RAW)
        return Encoded(nbytes, codec)

    def _choose(self, codecs: Sequence[int], link_nbytes_per_s: float | None) -> Codec:
        if not codecs or link_nbytes_per_s is None:
            return Codec.RAW
        if self._codecs is None:
            self._codecs = measured(self._kv.data.dtype, self._kv.data.shape[-1])
        return Codec(self._codecs.choose(codecs, link_nbytes_per_s))

    def _room_for(self, nbytes: int) -> Tensor:
        """For a payload between pool and codec; the copier's thread has one at a time."""
        if len(self._raw) < nbytes:
            self._raw = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._on_cuda)
        return self._raw[:nbytes]

    def _timed(
        self,
        copy: _Copy,
        lease: CopyLease,
        part: KVRange,
        staging: memoryview,
        is_entered: bool,
        computed: torch.cuda.Event | None,
    ) -> int:
        if not is_entered:
            lease.enter()
        try:
            if self._stream is not None and computed is not None:
                self._stream.wait_event(computed)
            raw = _uint8(staging)
            begin_ns = time.perf_counter_ns()
            if self._stream is None:
                copy(lease.block_table, part, raw)
            else:
                self._copy_on(self._stream, copy, lease.block_table, part, raw)
            return time.perf_counter_ns() - begin_ns
        finally:
            lease.exit()

    def _copy_on(
        self,
        stream: torch.cuda.Stream,
        copy: _Copy,
        block_table: Sequence[int],
        part: KVRange,
        raw: Tensor,
    ) -> None:
        """Returns when the device is done; sleeps meanwhile, as a spinning thread would cost the
        engine its core."""
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            copy(block_table, part, raw)
            done.record(stream)
        self._copied = done
        done.synchronize()


def _uint8(memory: memoryview) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
