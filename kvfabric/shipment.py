"""Shipment: the handle of a transfer under way at its sender, whole or in parts.

`Outgoing` is what one process sends to one other. Where the receiver, or the sender, is several
processes, `Shipments` makes one handle of several: it is done when all are, and the first failure
cancels the rest, for the receiver loses a transfer with any of its parts.
"""

import concurrent.futures
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from kvfabric.errors import FabricError
from kvfabric.ticket import ShipReport, around


class Shipment(ABC):
    """Made by `Fabric.ship`. Any thread may call its methods; they only enqueue."""

    def __init__(self) -> None:
        self.done: concurrent.futures.Future[ShipReport] = concurrent.futures.Future()
        """Ends on the fabric's loop, when no slot holds a frame of it any more."""
        self.done.set_running_or_notify_cancel()  # cancelling it is no way to cancel a transfer

    @abstractmethod
    def extend(self, num_tokens: int, num_layers: int | None = None) -> None:
        """KV of the ticket's tokens below `num_tokens` is computed; if `num_layers` is given, which
        it may be with all tokens, only of so many layers, the first ones."""

    @abstractmethod
    def commit(self, payload: bytes) -> None:
        """Nothing more will be extended; `payload` (at most a slot) goes with COMMIT."""

    @abstractmethod
    def cancel(self) -> None:
        """Gives the transfer up, between frames. Idempotent; nothing after the end."""


class Shipments(Shipment):
    """Several as one. Bytes, frames and times of packing add up; it took as long as the longest."""

    def __init__(self, parts: Sequence[Shipment]) -> None:
        super().__init__()
        assert parts
        self._parts = parts
        self._failure: FabricError | None = None
        self._num_done = 0
        for part in parts:
            part.done.add_done_callback(self._part_is_done)

    def extend(self, num_tokens: int, num_layers: int | None = None) -> None:
        for part in self._parts:
            part.extend(num_tokens, num_layers)

    def commit(self, payload: bytes) -> None:
        for part in self._parts:
            part.commit(payload)

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()

    def _part_is_done(self, done: concurrent.futures.Future[ShipReport]) -> None:
        """On the loop, as all of them."""
        self._num_done += 1
        failure = done.exception()
        if self._failure is None and failure is not None:
            assert isinstance(failure, FabricError), failure
            self._failure = failure
            self.cancel()
        if self._num_done < len(self._parts):
            return
        if self._failure is not None:
            self.done.set_exception(self._failure)
        else:
            self.done.set_result(self._report([part.done.result() for part in self._parts]))

    def _report(self, reports: Sequence[ShipReport]) -> ShipReport:
        return _added_up(reports)


class RankShipments(Shipments):
    """Of each rank of a sender, which ship beside each other: what it took is what the slowest
    took, stage by stage."""

    def _report(self, reports: Sequence[ShipReport]) -> ShipReport:
        pack_ns = max(report.pack_ns for report in reports)
        return replace(_added_up(reports), pack_ns=pack_ns, ranks=tuple(reports))


def _added_up(reports: Sequence[ShipReport]) -> ShipReport:
    return ShipReport(
        pack_ns=sum(report.pack_ns for report in reports),
        ship_ns=max(report.ship_ns for report in reports),
        nbytes=sum(report.nbytes for report in reports),
        frames=sum(report.frames for report in reports),
        pack=around(report.pack for report in reports),
        ship=around(report.ship for report in reports),
        transports=tuple(sorted({name for report in reports for name in report.transports})),
        codec=reports[0].codec,
        offers=sum(report.offers for report in reports),
    )
