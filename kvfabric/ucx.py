"""`ucx://host:port`: endpoints over UCX. The only module that imports ucxx.

UCX is one context, one progress thread and one notifier thread per process, bound to one event
loop. `UCXTransport`s of one loop share it; the last one to close takes it down, without which the
process would hang at exit. Never fork after this module is imported: spawn.

Six things here are not what ucxx does by itself:
- Operations are asked of the layer below its coroutines: a future each, instead of two tasks.
- A cancelled wait would drop the buffer that UCX still writes to. Here the operation keeps it.
- Its progress thread sleeps for long when there is nothing to do (ucx_clock.py).
- The ends of operations come to the loop by a shorter way (ucx_notifier.py).
- `abort` waits for UCX in a thread: the loop that carries everyone's frames must not.
- UCX keeps whoever connects to its listener and says nothing sensible, at worst at the cost of a
  core: strangers are reset (doorkeeper.py).

Errors of ucxx are turned into ours outside their `except` blocks: an exception that keeps one of
ucxx's as its context would keep the endpoint alive through its traceback.
"""

import asyncio
import gc
import logging
import os
from collections.abc import Sized
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from traceback import clear_frames, walk_tb
from typing import Any

os.environ.setdefault("UCX_MM_ERROR_HANDLING", "y")  # else shared memory is silently not used
os.environ.setdefault("UCX_SYSV_SEG_SIZE", "32768")  # with the next: room for 32 MiB under way;
os.environ.setdefault("UCX_SYSV_FIFO_SIZE", "1024")  # a full queue costs naps of 1 ms (4x slower)
os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", "256k")  # with the next: TCP at twice the speed
os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", "1m")
os.environ.setdefault("UCX_CM_REUSEADDR", "y")  # else a restart on the same port fails
os.environ.setdefault("UCX_LOG_FILE", "stderr")
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")

import ucxx
from ucxx._lib.arr import Array
from ucxx._lib_async.utils import hash64bits
from ucxx.types import Tag, TagMaskFull

from kvfabric.direct_end import direct_end
from kvfabric.doorkeeper import Doorkeeper
from kvfabric.errors import BadFrame, DeadlineExceeded, FabricError, PeerLost
from kvfabric.tasks import end
from kvfabric.transport import (
    Channel,
    Endpoint,
    Listener,
    OnEndpoint,
    Transport,
    split_address,
)
from kvfabric.ucx_clock import IDLE_MS, Clock, signaller, under_way
from kvfabric.ucx_lanes import endpoint_lanes, endpoint_peer, libucp
from kvfabric.ucx_notifier import Notifier

_logger = logging.getLogger(__name__)

_HANDSHAKE_SECONDS = 5.0  # of ucxx's own exchange of tags with a client of our listener


class _Context:
    """The process's UCX: who uses it, on which loop."""

    loop: asyncio.AbstractEventLoop | None = None
    users = 0
    closer: ThreadPoolExecutor | None = None
    clock: Clock | None = None
    notifier: Notifier | None = None


def _clock() -> Clock | None:
    """Instead of ucxx's own; None: that one stays."""
    worker = ucxx.core._get_ctx().worker
    wake = signaller(worker.handle)
    if wake is None:
        return None
    worker.stop_progress_thread()
    worker.start_progress_thread(polling_mode=False, epoll_timeout=IDLE_MS)
    return Clock(wake)


def _notifier() -> Notifier:
    """Instead of ucxx's own."""
    context = ucxx.core._get_ctx()
    context.worker.stop_request_notifier_thread()
    context.stop_notifier_thread()
    return Notifier(context.worker)


def _wind() -> None:
    if _Context.clock is not None:
        _Context.clock.wind()


class _UCXEndpoint(Endpoint):
    def __init__(self, ep: Any, closer: ThreadPoolExecutor, door: Doorkeeper | None = None) -> None:
        """`door`: of the listener it came to."""
        self._ep = ep
        self._closer = closer
        self._loop = asyncio.get_running_loop()
        self._transports = endpoint_lanes(ep.ucp_endpoint)
        peer = None if door is None else endpoint_peer(ep.ucp_endpoint)
        self._leave = door.admit(peer) if door is not None and peer is not None else lambda: None
        self._send_tags = {channel: _tag(ep, "msg_send", channel) for channel in Channel}
        self._recv_tags = {channel: _tag(ep, "msg_recv", channel) for channel in Channel}
        tls = os.environ.get("UCX_TLS", "all")
        self.direct = direct_end(self._transports, tls, connects=door is None)
        _wind()

    def send(self, channel: Channel, message: bytes | memoryview) -> asyncio.Future[None]:
        if self.direct is not None and self.direct.is_on:
            return self.direct.send(channel, message)
        sent = self._post("tag_send", message, self._send_tags[channel])
        if (clock := _Context.clock) is not None:
            clock.begin()
            sent.add_done_callback(lambda _: clock.end())
        return sent

    def recv(self, channel: Channel, buffer: bytearray | memoryview) -> asyncio.Future[None]:
        if self.direct is not None and self.direct.is_on:
            return self.direct.recv(channel, buffer)
        _wind()  # it may be there for long: only its submission is ours to hurry
        return self._post("tag_recv", buffer, self._recv_tags[channel], TagMaskFull)

    def abort(self) -> None:
        if self.direct is not None:
            self.direct.close()
        ep, self._ep = self._ep, None
        if ep is not None:
            leave = self._leave
            self._closer.submit(ep.abort).add_done_callback(lambda _: leave())
            _wind()

    @property
    def transports(self) -> tuple[str, ...]:
        if self.direct is not None and self.direct.is_on:
            return ("cma", *self._transports)
        return self._transports

    def _post(
        self, operation: str, buffer: bytearray | memoryview | bytes, *tag: Any
    ) -> asyncio.Future[None]:
        """Operations start in the order of the calls. UCX knows no more of a buffer than where it
        is: the operation keeps it until its end, whoever has left meanwhile."""
        posted: asyncio.Future[None] = self._loop.create_future()
        failure = "the connection is closed"
        if self._ep is not None and self._ep.alive:
            try:
                request = getattr(self._ep._ep, operation)(Array(buffer), *tag)
            except ucxx.exceptions.UCXError as error:
                failure = str(error)
            else:
                request.future.add_done_callback(partial(_ended, posted, request, buffer))
                return posted
        end(posted, PeerLost(failure))
        return posted


def _ended(
    posted: asyncio.Future[None], request: Any, buffer: Sized, ended: asyncio.Future[Any]
) -> None:
    """As UCX says; `request` and `buffer` were held until now."""
    match ended.exception():
        case None:
            end(posted)
        case ucxx.exceptions.UCXMessageTruncatedError() as error:
            end(posted, BadFrame(f"longer than {len(buffer)} bytes: {error}"))
        case error:
            end(posted, PeerLost(str(error)))


def _tag(ep: Any, way: str, channel: Channel) -> Any:
    """What ucxx's own `send` and `recv` make of `tag=int(channel)`."""
    return Tag(hash64bits(ep._tags[way], hash(int(channel))))


class _UCXListener(Listener):
    def __init__(self, listener: Any, host: str, door: Doorkeeper | None) -> None:
        self._listener = listener
        self._door = door
        self._address = f"ucx://{host}:{listener.port}"

    @property
    def address(self) -> str:
        return self._address

    @property
    def num_turned_away(self) -> int:
        return 0 if self._door is None else self._door.num_turned_away

    def close(self) -> None:
        if self._listener is not None:
            if self._door is not None:
                self._door.close()
            self._listener.close()
            self._listener = None


class UCXTransport(Transport):
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        if _Context.users and _Context.loop is not loop:
            raise FabricError("UCX serves one event loop per process, and another one has it")
        if not _Context.users:
            ucxx.init(
                progress_mode="thread",
                enable_python_future=True,
                enable_delayed_submission=True,  # else this thread spins on UCX's lock: 2x the CPU
            )
            _Context.clock = _clock()
            _Context.notifier = _notifier()
            _Context.loop = loop
            _Context.closer = ThreadPoolExecutor(1, thread_name_prefix="ucx-closer")
        _Context.users += 1
        assert _Context.closer is not None
        self._closer = _Context.closer

    async def connect(self, address: str, seconds: float) -> Endpoint:
        host, port = split_address(address)
        try:
            with under_way(_Context.clock):
                ep = await ucxx.create_endpoint(host, port, connect_timeout=seconds)
        except TimeoutError as error:
            failure: FabricError = DeadlineExceeded(f"{address} did not answer in {seconds:g} s")
            self._close_half_made(error)
        except (ucxx.exceptions.UCXError, RuntimeError) as error:
            failure = PeerLost(f"{address}: {error}")
            self._close_half_made(error)
        else:
            return _UCXEndpoint(ep, self._closer)
        raise failure

    def _close_half_made(self, error: BaseException) -> None:
        """ucxx leaves the endpoint of a failed `create_endpoint` to the garbage collector, whose
        thread then waits for UCX for seconds, with the GIL: nothing in the process moves."""
        halves = [frame.f_locals.get("ucx_ep") for frame, _ in walk_tb(error.__traceback__)]
        clear_frames(error.__traceback__)
        while halves:
            if (half := halves.pop()) is not None:
                self._closer.submit(half.close_blocking)

    async def listen(self, address: str, on_endpoint: OnEndpoint) -> Listener:
        """Listens on all interfaces: UCX's Python listener has no address to bind to."""
        host, port = split_address(address)
        closer = self._closer
        door: Doorkeeper | None = None

        async def on_client(ep: Any) -> None:
            on_endpoint(_UCXEndpoint(ep, closer, door))

        try:
            listener = ucxx.create_listener(on_client, port, connect_timeout=_HANDSHAKE_SECONDS)
        except ucxx.exceptions.UCXError as error:
            reason = str(error)
        else:
            if libucp() is not None:  # else nobody says who is a peer
                door = Doorkeeper(listener.port)
            return _UCXListener(listener, host, door)
        raise FabricError(f"cannot listen on {address}: {reason}")

    async def close(self) -> None:
        """The last user takes UCX down; the loop keeps turning meanwhile, for UCX needs it."""
        _Context.users -= 1
        if _Context.users:
            return
        loop = asyncio.get_running_loop()
        clock, _Context.clock = _Context.clock, None
        if clock is not None:
            clock.begin()
        await loop.run_in_executor(self._closer, gc.collect)  # behind every abort under way
        if clock is not None:
            clock.stop()  # what it wakes is about to go
        try:
            await loop.run_in_executor(self._closer, _reset)
        except ucxx.exceptions.UCXError as error:
            _logger.info("UCX is not wholly released: %s", " ".join(str(error).split()))
        self._closer.shutdown(wait=False)
        _Context.loop = _Context.closer = None


def _reset() -> None:
    notifier, _Context.notifier = _Context.notifier, None
    if notifier is not None:
        notifier.stop()
    ucxx.reset()
