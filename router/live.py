"""Which prompts are this router's own just now: who may own something on a worker. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LivePrompts:
    """Those that run, and those that have ended so lately that workers may not know it yet."""

    def __init__(self, grace_s: float, clock: Callable[[], float]) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._live: set[str] = set()
        self._ended: OrderedDict[str, float] = OrderedDict()  # when, the earliest first

    @contextmanager
    def running(self, request_id: str) -> Iterator[None]:
        self._live.add(request_id)
        try:
            yield
        finally:
            self._live.discard(request_id)
            self._forget_old()
            self._ended[request_id] = self._clock()

    @property
    def num_running(self) -> int:
        return len(self._live)

    def may_own(self, request_id: str) -> bool:
        self._forget_old()
        return request_id in self._live or request_id in self._ended

    def _forget_old(self) -> None:
        before = self._clock() - self._grace_s
        while self._ended and next(iter(self._ended.values())) < before:
            self._ended.popitem(last=False)
