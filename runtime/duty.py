"""What a worker does now: the roles it serves, and the calls that run for each. Loop thread only.

1. `call(role)` stands around each call; it refuses one whose role is not served.
2. `assign(roles, grace_s)`: from now on those. Calls for other roles have the grace to end; then
   each ends with `Draining`, and whoever asked goes on elsewhere. No roles: the worker drains.
   Calls that were to end and whose role is served again go on.

The stream is the lease here too: what a call holds goes with it, whoever ends it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from runtime.call import Draining


class Duty:
    """See the module. A role is a word: prefill, decode."""

    def __init__(self, name: str, roles: Iterable[str]) -> None:
        self.roles = frozenset(roles)
        """Served now."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when they have changed."""
        self._name = name
        self._calls: dict[asyncio.Timeout, str] = {}

    @property
    def num_leaving(self) -> int:
        """Calls for roles that are not served any more."""
        return sum(role not in self.roles for role in self._calls.values())

    @asynccontextmanager
    async def call(self, role: str) -> AsyncIterator[None]:
        """Raises Draining, at the beginning or when the grace is over."""
        if role not in self.roles:
            raise self._draining(role)
        lease = asyncio.timeout(None)
        try:
            async with lease:
                self._calls[lease] = role
                yield
        except TimeoutError:
            if not lease.expired():
                raise
            raise self._draining(role) from None
        finally:
            self._calls.pop(lease, None)

    def assign(self, roles: Iterable[str], grace_s: float) -> None:
        """May be called again at any time; the last word counts, its grace too."""
        self.roles = frozenset(roles)
        ends_at = asyncio.get_running_loop().time() + grace_s
        for lease, role in self._calls.items():
            if not lease.expired():
                lease.reschedule(None if role in self.roles else ends_at)
        self.on_change()

    def _draining(self, role: str) -> Draining:
        doing = " and ".join(sorted(self.roles)) or "nothing: it drains"
        return Draining(f"{self._name} does not serve {role}; it serves {doing}")
