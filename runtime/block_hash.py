"""The name of a full block of KV: a chained hash over everything that its KV depends on.

Pure, standard library only: the one fact that engines, KV stores and the router must agree on, so
each may import it. The same in every process and on every machine; golden vectors in the tests.

    root = H(fingerprint, cache salt)                       what KV means, and who may share it
    hash of block i = H(hash of block i - 1, its token ids, extra keys)

Fields are length-prefixed, so that no two lists of them give the same bytes. sha256, because a
prompt may come from somebody who would like to collide with another one.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""32 bytes."""

_ROOT = b"baton/root/1"
_BLOCK = b"baton/block/1"


def root_hash(fingerprint: bytes, cache_salt: str = "") -> BlockHash:
    """The parent of first blocks. `fingerprint` says what KV means (model, weights, dtype, KV
    format); requests with different salts never share a block."""
    return _digest(_ROOT, [fingerprint, cache_salt.encode()])


def block_hash(
    parent: BlockHash, token_ids: Sequence[int], extra_keys: Sequence[bytes] = ()
) -> BlockHash:
    """The block that follows `parent`. Token ids are unsigned, 32 bits; `extra_keys` are what its
    KV depends on beside them."""
    tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return _digest(_BLOCK, [parent, tokens, *extra_keys])


def short_hash(name: BlockHash) -> int:
    """Its first 64 bits, for indexes that may be wrong: two blocks may share them."""
    return int.from_bytes(name[:8], "little")


def _digest(kind: bytes, fields: Sequence[bytes]) -> BlockHash:
    digest = hashlib.sha256(kind)
    for field in fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return BlockHash(digest.digest())
