"""Block hashes: golden vectors, equal in every process, and different where they must be."""

import struct
import subprocess
import sys

import pytest

from runtime.block_hash import BlockHash, block_hash, root_hash

FINGERPRINT = bytes(range(32))
SCRIPT = """
from runtime.block_hash import block_hash, root_hash
root = root_hash(bytes(range(32)), "salt")
print(block_hash(block_hash(root, range(16)), [49151] * 16, [b"adapter"]).hex())
"""


def chain(*blocks: list[int], salt: str = "") -> BlockHash:
    last = root_hash(FINGERPRINT, salt)
    for token_ids in blocks:
        last = block_hash(last, token_ids)
    return last


GOLDEN = {
    "root": (chain(), "61c6edcd3cc5c3483531dc5828af4529e48e2e9c45e8a44f3d443cb68a4a9e4c"),
    "salted root": (
        chain(salt="tenant-a"),
        "29dbe3fc1cc5e5e3d224e8806da5c55b588d147ede8fde8ec803424c86dccf04",
    ),
    "one block": (
        chain(list(range(16))),
        "072b99b29d8871fa4dc2479279da07822826c24ce2ef5edee0340b00a0d1e569",
    ),
    "two blocks": (
        chain(list(range(16)), [0, 1, 49151, (1 << 32) - 1]),
        "5667983d2efe1462aa78e1c926b12140db92559820f395aa79b4c7534a1eac31",
    ),
    "extra keys": (
        block_hash(chain(), [1, 2, 3], [b"adapter", b""]),
        "5426422a28e4d707d5c8e57e96e3eea462c3a4adc0481ea8b7daeb02bae062cd",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name: str) -> None:
    """A change here makes every stored block worthless, and workers of two versions strangers."""
    found, expected = GOLDEN[name]
    assert found.hex() == expected


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_the_same_in_every_process(seed: str) -> None:
    command = [sys.executable, "-c", SCRIPT]
    said = subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, check=True)
    root = root_hash(FINGERPRINT, "salt")
    expected = block_hash(block_hash(root, range(16)), [49151] * 16, [b"adapter"])
    assert said.stdout.decode().strip() == expected.hex()


def test_everything_counts() -> None:
    hashes = [
        chain(),
        chain(salt="a"),
        root_hash(FINGERPRINT + b"a"),
        root_hash(b""),
        chain([1, 2]),
        chain([1, 2], salt="a"),
        chain([2, 1]),
        chain([1], [2]),
        chain([1, 2, 0]),
        block_hash(chain(), [1, 2], [b""]),
        block_hash(chain(), [1, 2], [b"ab"]),
        block_hash(chain(), [1, 2], [b"a", b"b"]),
        block_hash(chain(), [], []),
    ]
    assert len(set(hashes)) == len(hashes)
    assert {len(name) for name in hashes} == {32}


def test_token_ids_are_unsigned_32_bits() -> None:
    for token_id in (-1, 1 << 32):
        with pytest.raises(struct.error):
            block_hash(chain(), [token_id])
