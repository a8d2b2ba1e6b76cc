"""Copies beside the step: results, leases, order, failure and the way out."""

import threading
from collections.abc import Iterator

import pytest
import torch

from engine.errors import EngineStopped, LeaseClosed
from engine.kv_cache import KVCache
from engine.kv_copier import KVCopier
from engine.kv_lease import KVLease
from engine.request import BlockId, RequestId
from tests.engine.test_kv_cache import Part, make


@pytest.fixture
def kv() -> KVCache:
    return make(4)


@pytest.fixture
def copier(kv: KVCache) -> Iterator[KVCopier]:
    copier = KVCopier(kv)
    yield copier
    copier.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-copier")]


class Lease(KVLease):
    """Remembers that it drained."""

    __slots__ = ("drained",)

    def __init__(self, *block_table: int) -> None:
        self.drained = threading.Event()
        super().__init__(
            RequestId("r"), [BlockId(b) for b in block_table], lambda _: self.drained.set()
        )


class Gate:
    """Holds the copier's thread inside a copy."""

    def __init__(self, kv: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        gather = kv.gather

        def gated(*args: object) -> None:
            self.entered.set()
            assert self.open.wait(10)
            gather(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(kv, "gather", gated)


def test_there_and_back(kv: KVCache, copier: KVCopier) -> None:
    part = Part(2, 9)
    staging = copier.allocate_staging(2 * kv.payload_nbytes(part))
    slot = staging[kv.payload_nbytes(part) :]
    before = kv.data[:, :, [3, 1, 5]].flatten(2, 3)[:, :, 2:11].clone()
    assert copier.gather(Lease(3, 1, 5), part, slot).result(10) > 0
    assert copier.scatter(Lease(8, 0, 7), part, slot).result(10) > 0
    assert torch.equal(kv.data[:, :, [8, 0, 7]].flatten(2, 3)[:, :, 2:11], before)
    copier.record_compute()
    copier.wait_scatters(Lease(8, 0, 7))


def test_staging_is_writable_bytes(copier: KVCopier) -> None:
    staging = copier.allocate_staging(1000)
    assert (staging.nbytes, staging.format, staging.readonly) == (1000, "B", False)
    assert staging.contiguous
    assert bytes(staging) == bytes(1000)


def test_a_closed_lease_is_not_copied(kv: KVCache, copier: KVCopier) -> None:
    lease = Lease(3, 1)
    assert lease.close()
    before = kv.data.clone()
    payload = memoryview(bytearray(kv.payload_nbytes(Part(0, 8))))
    for future in (
        copier.gather(lease, Part(0, 8), payload),
        copier.scatter(lease, Part(0, 8), payload),
    ):
        with pytest.raises(LeaseClosed):
            future.result(10)
    assert torch.equal(kv.data, before)
    assert bytes(payload) == bytes(len(payload))


def test_blocks_stay_until_the_copy_under_way_is_done(
    kv: KVCache, copier: KVCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, lease = Gate(kv, monkeypatch), Lease(3)
    out = copier.allocate_staging(kv.payload_nbytes(Part(0, 4)))
    under_way = copier.gather(lease, Part(0, 4), out)
    assert gate.entered.wait(10)
    assert not lease.close()
    late = copier.gather(lease, Part(0, 4), out)
    assert not lease.drained.is_set()
    gate.open.set()
    under_way.result(10)
    assert lease.drained.wait(10)
    with pytest.raises(LeaseClosed):
        late.result(10)


def test_a_failed_copy_leaves_its_lease(kv: KVCache, copier: KVCopier) -> None:
    lease = Lease(3)
    with pytest.raises(AssertionError):
        copier.gather(lease, Part(0, 4), memoryview(bytearray(5))).result(10)
    assert lease.close(), "nothing is under way"


def test_closing_completes_what_was_asked_for(kv: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, copier = Gate(kv, monkeypatch), KVCopier(kv)
    out = copier.allocate_staging(kv.payload_nbytes(Part(0, 4)))
    futures = [copier.gather(Lease(block), Part(0, 4), out) for block in range(5)]
    assert gate.entered.wait(10)
    threading.Timer(0.05, gate.open.set).start()
    copier.close()
    assert all(future.done() for future in futures)
    with pytest.raises(EngineStopped):
        copier.gather(Lease(0), Part(0, 4), out)
    copier.close()


def test_a_copy_that_was_entered_outlives_its_lease(kv: KVCache, copier: KVCopier) -> None:
    """As when a sequence gives way: its blocks stay until they are copied, and no longer."""
    part = Part(0, 8)
    expected = copier.allocate_staging(kv.payload_nbytes(part))
    copier.gather(Lease(3, 5), part, expected).result(10)
    lease, payload = Lease(3, 5), copier.allocate_payload(kv.payload_nbytes(part))
    lease.enter()
    assert not lease.close()
    copier.gather(lease, part, payload, is_entered=True).result(10)
    assert lease.drained.wait(10)
    assert payload == expected
