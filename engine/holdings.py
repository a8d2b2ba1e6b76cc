"""What each sequence holds in the pool: its cached prefix, its blocks, its promise, its lease.

The scheduler decides who gets or loses room; here it is given and taken. Engine thread only. One
stay of a sequence:

1. `find` looks for the longest prefix of its tokens that the cache has; `cost` says what it would
   take from the pool.
2. `admit` references that prefix and takes blocks for the rest; or `reserve` references it and
   promises the rest, which `claim` redeems. Either way computing begins behind the prefix, and what
   is referenced cannot be evicted before the rest has come.
3. `name_computed` lets others find the blocks that are whole.
4. `fork` gives another sample of the prompt its own table, as was promised when the first came in.
5. `end_lease` lets nobody copy any more, and keeps the rest.
6. `release` lets go of all of it. Blocks with copies under way are in flight until `drained`.
"""

from collections.abc import Callable, Collection
from itertools import chain

from engine.block_pool import BlockPool
from engine.kv_lease import KVLease
from engine.prefix_cache import PrefixCache
from engine.request import BlockId
from engine.scheduled_batch import BlockCopy
from engine.sequence import Sequence


class Holdings:
    """See the module. Without a cache nothing is ever found."""

    def __init__(self, pool: BlockPool, cache: PrefixCache | None) -> None:
        self.on_drained: Callable[[KVLease], object] = self.drained
        """Called by the thread of a closed lease's last copy; has `drained` called on the engine
        thread."""
        self._pool = pool
        self._cache = cache
        self.draining: set[KVLease] = set()
        """Closed, copies under way, and its blocks let go."""
        self._ending: dict[KVLease, Sequence] = {}  # closed, copies under way into whose blocks

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    def find(self, seq: Sequence) -> list[BlockId]:
        return self._cache.find(seq) if self._cache is not None else []

    def num_needed(self, seq: Sequence) -> int:
        """Blocks for all present tokens, and one more if it will grow."""
        need = self._pool.blocks_for(seq.num_tokens)
        if seq.is_prefill_leg:
            return need
        return min(need + 1, self._pool.blocks_for(seq.max_num_tokens))

    def cost(self, seq: Sequence, hits: Collection[BlockId]) -> int:
        """What its coming in takes from `available`, with what those need that fork from it."""
        forks = sum(map(self._num_own, seq.forks))
        return self.num_needed(seq) + forks - len(hits) + self._pool.num_evictable(hits)

    def admit(self, seq: Sequence, hits: list[BlockId]) -> None:
        """Blocks for all present tokens."""
        self._begin(seq, hits)
        missing = self._pool.blocks_for(seq.num_tokens) - len(hits)
        seq.block_table.extend(self._pool.take(missing))

    def reserve(self, seq: Sequence, hits: list[BlockId]) -> None:
        self._begin(seq, hits)
        seq.num_promised_blocks = self.num_needed(seq) - len(hits)
        self._pool.promise(seq.num_promised_blocks)

    def claim(self, seq: Sequence) -> KVLease:
        """Turns its promise into blocks, if it has not been."""
        seq.block_table.extend(self._pool.redeem(seq.num_promised_blocks))
        seq.num_promised_blocks = 0
        return self.lease(seq)

    def lease(self, seq: Sequence) -> KVLease:
        """The right to copy, one per stay in the pool."""
        if seq.lease is None:
            name, since_ns = seq.request_id, seq.submitted_ns
            seq.lease = KVLease(name, seq.block_table, self._on_drained, since_ns)
        return seq.lease

    def _on_drained(self, lease: KVLease) -> None:
        self.on_drained(lease)

    def fork(self, leader: Sequence, fork: Sequence) -> BlockCopy | None:
        """`fork` shares the whole blocks of its first `num_forked_tokens` and has what was promised
        for the rest. Returns the copy that gives it the tail of those tokens, if there is one:
        to be done before anybody writes into either block."""
        num_shared, tail = divmod(fork.num_forked_tokens, self._pool.block_size)
        shared = leader.block_table[:num_shared]
        self._pool.fork(shared)
        own = self._pool.redeem(fork.num_promised_blocks)
        fork.num_promised_blocks = 0
        fork.block_table.extend(shared + own)
        fork.block_hashes = leader.block_hashes[:num_shared]
        fork.num_named_blocks = num_shared
        fork.num_computed_tokens = fork.num_forked_tokens
        return BlockCopy(leader.block_table[num_shared], own[0]) if tail else None

    def grow(self, seq: Sequence) -> None:
        seq.block_table.extend(self._pool.take(1))

    def name_computed(self, seq: Sequence) -> None:
        if self._cache is not None:
            self._cache.add(seq)

    def release(self, seq: Sequence) -> None:
        """The one way out: gives back blocks and promise."""
        for promised in (seq, *seq.forks):
            self._pool.withdraw(promised.num_promised_blocks)
            promised.num_promised_blocks = 0
        lease, seq.lease = seq.lease, None
        is_ending = lease is not None and self._ending.pop(lease, None) is not None
        block_ids = seq.drop_blocks()
        if lease is None or (not is_ending and lease.close()):
            self._pool.free(block_ids)
        else:
            self._pool.leave_in_flight(block_ids)
            self.draining.add(lease)

    def end_lease(self, seq: Sequence) -> bool:
        """Nobody begins to copy into its blocks any more; True if nobody is at it now either. Else
        `drained` will say when."""
        if seq.lease is None or seq.lease.close():
            seq.lease = None
            return True
        self._ending[seq.lease] = seq
        return False

    def drained(self, lease: KVLease) -> Sequence | None:
        """The last copy under a closed lease is over: its blocks are free, unless the sequence has
        kept them; then it is returned."""
        if (seq := self._ending.pop(lease, None)) is not None:
            seq.lease = None
            return seq
        self.draining.remove(lease)
        self._pool.land(lease.block_table)
        return None

    def discrepancy(self, seqs: Collection[Sequence], *, every_block: bool = False) -> str:
        """In what the pool's counts differ from what sequences and leases own; empty: in nothing.
        By sums, O(sequences), or `every_block`, which knows which blocks are shared."""
        pool, ledger = self._pool, self._pool.ledger()
        found = [
            ("references", pool.num_references, sum(len(seq.block_table) for seq in seqs)),
            ("promised", ledger.promised, sum(seq.num_promised_blocks for seq in seqs)),
        ]
        if every_block:
            held = set(chain.from_iterable(seq.block_table for seq in seqs))
            leaving = set(chain.from_iterable(lease.block_table for lease in self.draining))
            found.append(("held", ledger.held, len(held)))
            found.append(("in flight", ledger.in_flight, len(leaving - held)))
        wrong = [
            f"{name}: {counted} counted, {owned} owned"
            for name, counted, owned in found
            if counted != owned
        ]
        return "; ".join(wrong if pool.is_balanced else [f"sums: {ledger}", *wrong])

    def check(self, seqs: Collection[Sequence]) -> None:
        """Asserts that every block is where its sequence or lease says; O(num_blocks)."""
        self._pool.check()
        discrepancy = self.discrepancy(seqs, every_block=True)
        assert not discrepancy, discrepancy

    def _num_own(self, fork: Sequence) -> int:
        """Blocks that one that is to fork needs beside those it will share."""
        if fork.is_prefill_leg:  # it only draws its first token
            return 0
        return self.num_needed(fork) - fork.num_forked_tokens // self._pool.block_size

    def _begin(self, seq: Sequence, hits: list[BlockId]) -> None:
        assert not seq.block_table, seq.request_id
        self._pool.share(hits)
        seq.block_table.extend(hits)
        seq.num_named_blocks = len(hits)
        seq.num_cached_tokens = seq.num_computed_tokens = len(hits) * self._pool.block_size
        for fork in seq.forks:
            fork.num_promised_blocks = self._num_own(fork)
            self._pool.promise(fork.num_promised_blocks)
