"""Names the blocks of sequences, so that prompts find KV which others have computed.

Knows token ids and the pool's hashes; whether a block is held, cached or gone is the pool's. Only
full blocks have a name. Engine thread only.
"""

from collections.abc import Iterator

from engine.block_pool import BlockPool
from engine.request import BlockId
from engine.sequence import Sequence
from runtime.block_hash import BlockHash, block_hash, root_hash


class PrefixCache:
    """See the module. `fingerprint` says what KV means here."""

    def __init__(self, pool: BlockPool, fingerprint: bytes) -> None:
        self._pool = pool
        self._fingerprint = fingerprint

    def find(self, seq: Sequence) -> list[BlockId]:
        """The longest cached prefix of its tokens that leaves to compute what must be; so a shared
        block is never written."""
        return self._pool.lookup(self._hashes(seq, seq.max_cached_tokens // self._pool.block_size))

    def add(self, seq: Sequence) -> None:
        """Blocks that `num_computed_tokens` has passed may be found from now on."""
        num_full = seq.num_computed_tokens // self._pool.block_size
        if num_full <= seq.num_named_blocks:
            return
        for index, name in enumerate(self._hashes(seq, num_full)):
            if index >= seq.num_named_blocks:
                self._pool.cache(seq.block_table[index], name)
        seq.num_named_blocks = num_full

    def _hashes(self, seq: Sequence, num_blocks: int) -> Iterator[BlockHash]:
        """Of its first blocks; each is computed once, when it is first asked for."""
        size, hashes = self._pool.block_size, seq.block_hashes
        for index in range(num_blocks):
            if index == len(hashes):
                salt = seq.request.cache_salt
                parent = hashes[-1] if hashes else root_hash(self._fingerprint, salt)
                token_ids = seq.token_ids[index * size : (index + 1) * size].tolist()  # host memory
                hashes.append(block_hash(parent, token_ids))
            yield hashes[index]
