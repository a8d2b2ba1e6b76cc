"""Who of those at the fabric's listening port is a stranger.

UCX bounds neither how long a connection to its listener may take to say who it is, nor how many
there are; and of one that sent more than its buffer takes it reads nothing, again and again, for as
long as the process lives (docs/log.md). A peer is through within milliseconds. UCX reads what has
come at once and lets go at once of whoever leaves: who stands there with bytes unread, or gone,
look after look, is stuck. Pure: it is told at each look who stands there. It counts looks and not
seconds, so that a process that stood still judges nobody the sooner.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

STUCK_LOOKS = 3
"""Seen stuck so often in a row: reset."""
MAX_LOOKS = 8
"""Seen so often, and no peer yet: reset. A second apart, it is longer than ucxx waits for one."""
MAX_CALLERS = 64
"""So many may take longer than one look; of more, those who have been there longest are reset."""


class Peer(NamedTuple):
    """The far end of a connection."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Caller:
    """A connection to the listening port, at one look."""

    inode: int
    """Of its socket: no other has it while this one lives."""
    peer: Peer
    is_stuck: bool
    """Bytes lie there unread, or the far end has closed it."""


@dataclass(slots=True)
class _Record:
    num_looks: int = 0
    num_stuck: int = 0
    """Looks in a row."""

    @property
    def is_stranger(self) -> bool:
        return self.num_stuck >= STUCK_LOOKS or self.num_looks >= MAX_LOOKS


class Strangers:
    """See the module. Of one listening port."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}  # by inode; those seen first come first

    def judge(self, callers: Sequence[Caller], admitted: Container[Peer]) -> list[Caller]:
        """Whom to reset. `admitted`: those with whom the fabric speaks."""
        unknown = {one.inode: one for one in callers if one.peer not in admitted}
        for inode in self._records.keys() - unknown.keys():
            del self._records[inode]
        for inode, caller in unknown.items():
            record = self._records.setdefault(inode, _Record())
            record.num_looks += 1
            record.num_stuck = record.num_stuck + 1 if caller.is_stuck else 0
        strangers = [inode for inode, record in self._records.items() if record.is_stranger]
        lingering = [
            inode
            for inode, record in self._records.items()
            if record.num_looks > 1 and not record.is_stranger
        ]
        strangers += lingering[: max(0, len(lingering) - MAX_CALLERS)]
        return [unknown[inode] for inode in strangers]
