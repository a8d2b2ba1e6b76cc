"""The short way of a streamed body: from the reply to the connection, past everything between.

What stands between an endpoint and its connection (middleware, exception handlers, h11) cares for
the beginning and the end of an answer; each part of its body, a token as a rule, only goes through.
"""

from collections.abc import MutableMapping
from typing import Any, Protocol

CONNECTION = "baton.connection"
"""Where a scope's state has it, if it can do this."""


class Connection(Protocol):
    @property
    def is_writable(self) -> bool:
        """What goes the long way now will not have to wait either."""

    def take_chunk(self, body: bytes) -> bool:
        """Hands more of a body of unknown length to the network, in one chunk. False: it cannot
        just now, or not in this answer; it is to go the long way, on which one can wait."""

    def leave(self) -> None:
        """Ends it at once, with what the client has not taken: an orderly end would wait for a
        client that takes nothing for as long as it stays."""


def connection_of(scope: MutableMapping[str, Any]) -> Connection | None:
    connection: Connection | None = scope.get("state", {}).get(CONNECTION)
    return connection
