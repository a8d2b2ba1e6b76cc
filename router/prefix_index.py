"""Which blocks one worker has cached, as it tells. Pure.

Blocks are known by the first 64 bits of their hash: a set of integers, never more than the worker
has blocks. It predicts; the worker looks for itself when the request comes.
"""

from collections.abc import Iterable, Iterator
from itertools import count

from protos import serving_pb2 as pb
from runtime.block_hash import BlockHash, block_hash, root_hash, short_hash


class PrefixIndex:
    """See the module."""

    def __init__(self) -> None:
        self.generation = 0
        """Of the process that told of them."""
        self.next_change = 0
        """The number of the first change that is not in it."""
        self._blocks: set[int] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def __eq__(self, other: object) -> bool:
        """The same blocks are cached."""
        return isinstance(other, PrefixIndex) and self._blocks == other._blocks

    __hash__ = None  # type: ignore[assignment]

    def apply(self, generation: int, changes: pb.CacheChanges, max_blocks: int) -> bool:
        """False: it does not follow on what is known, or there would be more than `max_blocks`.
        Nothing is known then."""
        if changes.is_snapshot:
            self._blocks = set(changes.stored[:max_blocks])
        elif (generation, changes.first_change) != (self.generation, self.next_change):
            self.clear()
            return False
        else:
            self._blocks.difference_update(changes.removed)
            self._blocks.update(changes.stored)
            if len(self._blocks) > max_blocks:
                self.clear()
                return False
        self.generation, self.next_change = generation, changes.next_change
        return True

    def clear(self) -> None:
        self.generation, self.next_change = 0, 0
        self._blocks = set()

    def num_cached(self, blocks: Iterable[int]) -> int:
        """How many of a chain, from its first on; `blocks` is read no further than the first
        miss."""
        found = 0
        for block in blocks:
            if block not in self._blocks:
                break
            found += 1
        return found


class PromptBlocks:
    """The blocks of one prompt, as workers name them: computed as far as somebody asks, once for
    each kind of worker (fingerprint and block size)."""

    def __init__(self, token_ids: tuple[int, ...], cache_salt: str = "") -> None:
        self._token_ids = token_ids
        self._salt = cache_salt
        self._chains: dict[tuple[bytes, int], list[BlockHash]] = {}

    def of(self, fingerprint: bytes, block_size: int) -> Iterator[int]:
        """Full blocks that leave at least a token to compute, as `short_hash` says them."""
        if block_size <= 0:
            return
        chain = self._chains.setdefault((fingerprint, block_size), [])
        for index in count():
            end = (index + 1) * block_size
            if end >= len(self._token_ids):
                return
            if index == len(chain):
                parent = chain[-1] if chain else root_hash(fingerprint, self._salt)
                chain.append(block_hash(parent, self._token_ids[end - block_size : end]))
            yield short_hash(chain[index])

    def num_cached_tokens(self, index: PrefixIndex, fingerprint: bytes, block_size: int) -> int:
        """That a worker of that kind has."""
        return index.num_cached(self.of(fingerprint, block_size)) * block_size
