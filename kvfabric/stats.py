"""Counters of a fabric, and the snapshot that other threads get."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class FabricStats:
    """One moment of a fabric. Totals only grow; the other numbers are levels."""

    send_slots_used: int
    send_slots: int
    recv_slots_used: int
    recv_slots: int
    expected_transfers: int
    """`expect`ed and neither committed, lost nor forgotten."""
    outgoing_transfers: int
    """`ship`ped and not done."""
    endpoints: int
    """Connections, both directions; those being made included."""
    transports: tuple[str, ...]
    """What the live connections really run over, such as ("posix", "sysv", "tcp")."""
    sent_nbytes: int
    """Payload bytes of KV frames."""
    sent_frames: int
    received_nbytes: int
    received_frames: int
    dropped_frames: int
    """Received and thrown away: late, unknown, duplicate, or of a lost transfer."""
    errors: dict[str, int]
    """Failed transfers by the name of their error; `Stranger`: connections that were reset because
    no peer was at their far end."""
    links_nbytes_per_s: dict[str, float]
    """What the connections to receivers were measured to carry, by address."""
    injected_faults: dict[str, int]
    """Messages harmed on purpose, by `kind:fault`; see kvfabric/faults.py."""
    ledger_violations: int
    """Audits of the slots that found one lost, or lent twice."""
    loop_lag_s: float
    """Longest time a due timer waited for the fabric's loop in the last 15 s."""


def added_up(all_stats: Sequence[FabricStats]) -> FabricStats:
    """Of several fabrics as of one; the lag is the worst of them."""
    sums: dict[str, Any] = {}
    for field_ in fields(FabricStats):
        values = [getattr(stats, field_.name) for stats in all_stats]
        match values[0]:
            case dict():
                sums[field_.name] = dict(sum(map(Counter, values), Counter()))
            case tuple():
                sums[field_.name] = tuple(sorted(set().union(*values)))
            case float():
                sums[field_.name] = max(values)
            case _:
                sums[field_.name] = sum(values)
    return FabricStats(**sums)


class LentSlot(NamedTuple):
    """A staging slot that is in use."""

    budget: Literal["send", "recv"]
    owner: str
    """As the ticket says; empty: for a frame that is on offer and has not come."""
    since_ns: int
    """By time.monotonic_ns."""


@dataclass(slots=True)
class FabricCounters:
    """The totals. Written on the fabric's loop only."""

    sent_nbytes: int = 0
    sent_frames: int = 0
    received_nbytes: int = 0
    received_frames: int = 0
    dropped_frames: int = 0
    ledger_violations: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def count_error(self, error: BaseException) -> None:
        self.errors[type(error).__name__] += 1
