import threading

import pytest

from engine.errors import LeaseClosed
from engine.kv_lease import KVLease
from engine.request import BlockId, RequestId


class Drains:
    def __init__(self) -> None:
        self.leases: list[KVLease] = []
        self.lease = KVLease(RequestId("r"), [BlockId(0)], self.leases.append)


def test_closing_an_idle_lease_drains_at_once() -> None:
    drains = Drains()
    drains.lease.enter()
    drains.lease.exit()
    assert drains.lease.close()
    assert drains.leases == []


def test_last_exit_drains_a_closed_lease_once() -> None:
    drains = Drains()
    drains.lease.enter()
    drains.lease.enter()
    assert not drains.lease.close()
    drains.lease.exit()
    assert drains.leases == []
    drains.lease.exit()
    assert drains.leases == [drains.lease]


def test_a_closed_lease_admits_no_copy() -> None:
    drains = Drains()
    drains.lease.close()
    with pytest.raises(LeaseClosed, match="r"):
        drains.lease.enter()


def test_close_races_with_copies() -> None:
    for _ in range(50):
        drains = Drains()
        barrier = threading.Barrier(5)

        def copy(lease: KVLease = drains.lease, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            for _ in range(20):
                try:
                    lease.enter()
                except LeaseClosed:
                    return
                lease.exit()

        threads = [threading.Thread(target=copy) for _ in range(4)]
        for thread in threads:
            thread.start()
        barrier.wait()
        idle = drains.lease.close()
        for thread in threads:
            thread.join()
        assert len(drains.leases) == (0 if idle else 1)
