"""The ledger of KV blocks: which ids are free, cached, held or in flight, how many are promised.

Ids, counts and hashes only: no tensors, no sequences, no clock. Engine thread only.

    free ──take──▶ held ──free──▶ free, or cached if it has a hash
    free ──promise──▶ promised ──redeem──▶ held   no ids until redeemed; cannot fail then
                      promised ──withdraw──▶ free
    held ──leave_in_flight──▶ in flight ──land──▶ free or cached   a copy is under way
    cached ──share──▶ held      another sequence has the same prefix
    held ──fork──▶ held         another sample of the same prompt; shared, whatever its hash
    cached ──(take, redeem)──▶ held     evicted, the least recently used first, when none is free
    cached ◀──(pin, unpin)──▶ pinned    never evicted; else as a cached one

A block that several sequences hold is held once; it is free or cached when the last lets go. So
is one whose copies are under way: nothing that is copied is ever evicted. Blocks with a hash are
never written again: who holds one only reads it.

Always free + cached + pinned + held + in_flight + promised = num_blocks. Promises are met from free
blocks first: cached ones that they will need are not counted as cached any more. No more than
`max_pinned` are kept for pins (engine/pins.py), held ones included: all others can be had.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.block_ledger import BlockLedger
from engine.cache_journal import CacheJournal
from engine.pins import Pins
from engine.request import BlockId
from runtime.block_hash import BlockHash


class BlockPool:
    """See the module."""

    def __init__(self, num_blocks: int, block_size: int, max_pinned: int = 0) -> None:
        assert 0 <= max_pinned < num_blocks, (max_pinned, num_blocks)
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_pinned = max_pinned
        self.journal = CacheJournal()
        """Hears what the prefix cache has and has not."""
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]  # a stack: warm ids first
        self._num_refs = [0] * num_blocks  # sequences that hold it
        self._num_copies = [0] * num_blocks  # sequences that let go of it in mid copy
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()  # oldest first
        self._pins = Pins()
        self._pinned: set[BlockId] = set()  # held or not
        self._kept: set[BlockId] = set()  # of those, nobody's
        self._num_references = 0
        self._num_held = 0
        self._num_in_flight = 0
        self._num_promised = 0

    @property
    def available(self) -> int:
        """Blocks that may be taken or promised now."""
        return len(self._free) + len(self._evictable) - self._num_promised

    @property
    def num_grantable(self) -> int:
        """Blocks that one request may have, whatever is pinned."""
        return self.num_blocks - self.max_pinned

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def num_references(self) -> int:
        """By sequences; a block that two hold counts twice."""
        return self._num_references

    @property
    def is_balanced(self) -> bool:
        """Every block is counted once, and no more are promised than there are."""
        resting = len(self._free) + len(self._evictable)
        used = len(self._kept) + self._num_held + self._num_in_flight
        return resting + used == self.num_blocks and 0 <= self._num_promised <= resting

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    # ── ids and promises ──

    def take(self, num_blocks: int) -> list[BlockId]:
        assert 0 <= num_blocks <= self.available, (num_blocks, self.ledger())
        return self._pop(num_blocks)

    def promise(self, num_blocks: int) -> None:
        assert 0 <= num_blocks <= self.available, (num_blocks, self.ledger())
        self._num_promised += num_blocks

    def redeem(self, num_blocks: int) -> list[BlockId]:
        """Turns promised blocks into held ones."""
        self.withdraw(num_blocks)
        return self._pop(num_blocks)

    def withdraw(self, num_blocks: int) -> None:
        """Takes a promise back."""
        assert 0 <= num_blocks <= self._num_promised, (num_blocks, self.ledger())
        self._num_promised -= num_blocks

    def free(self, block_ids: Sequence[BlockId]) -> None:
        """A sequence lets go of its block table. Its end ages first: a block is of no use to
        anybody once those before it are evicted."""
        for block_id in reversed(block_ids):
            self._drop_reference(block_id)

    def leave_in_flight(self, block_ids: Iterable[BlockId]) -> None:
        """Their sequence is gone, but copies still touch them."""
        for block_id in block_ids:
            self._num_copies[block_id] += 1
            self._drop_reference(block_id)

    def land(self, block_ids: Sequence[BlockId]) -> None:
        """The copies are done."""
        for block_id in reversed(block_ids):
            assert self._num_copies[block_id] > 0, block_id
            self._num_copies[block_id] -= 1
            if not self._num_copies[block_id] and not self._num_refs[block_id]:
                self._num_in_flight -= 1
                self._rest(block_id)

    # ── the prefix cache ──

    def cache(self, block_id: BlockId, block_hash: BlockHash) -> None:
        """The KV of a held block is whole: others may find it. Where the cache has that KV
        already, this copy of it stays its holders' own."""
        assert self._num_refs[block_id] > 0, block_id
        if self._hashes[block_id] is None and block_hash not in self._by_hash:
            self._hashes[block_id] = block_hash
            self._by_hash[block_hash] = block_id
            self.journal.stored(block_hash)
            if block_hash in self._pins and len(self._pinned) < self.max_pinned:
                self._pinned.add(block_id)

    def lookup(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """The longest cached prefix of a chain; `hashes` is read no further than the first miss."""
        found = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_evictable(self, block_ids: Iterable[BlockId]) -> int:
        """What sharing these would take from `available`."""
        return sum(block_id in self._evictable for block_id in block_ids)

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Another sequence holds these, as `lookup` found them."""
        assert self.num_evictable(block_ids) <= self.available, (block_ids, self.ledger())
        for block_id in block_ids:
            assert self._hashes[block_id] is not None, block_id
            self._evictable.pop(block_id, None)
            self._kept.discard(block_id)
            self._add_reference(block_id)

    def fork(self, block_ids: Iterable[BlockId]) -> None:
        """Another sequence holds these too, as somebody does already; it will only read them."""
        for block_id in block_ids:
            assert self._num_refs[block_id] > 0, block_id
            self._add_reference(block_id)

    # ── pins ──

    def pin(self, name: str, hashes: Sequence[BlockHash], until_s: float) -> tuple[int, int]:
        """Keeps what of these is cached or comes to be, until that moment. How many are cached
        now, and how many of those are kept."""
        self._pins.add(name, hashes, until_s)
        self._choose_pinned()
        cached = [self._by_hash[one] for one in hashes if one in self._by_hash]
        return len(cached), len(self._pinned.intersection(cached))

    def unpin(self, name: str) -> bool:
        """False: there is none of that name."""
        was_there = self._pins.remove(name)
        self._choose_pinned()
        return was_there

    def expire_pins(self, now_s: float) -> None:
        if self._pins.expire(now_s):
            self._choose_pinned()

    @property
    def num_pinned(self) -> int:
        """Blocks that are kept, held ones included."""
        return len(self._pinned)

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    def _choose_pinned(self) -> None:
        """What is promised already stays to be had: such blocks are kept when they rest again."""
        room = self.available
        chosen: set[BlockId] = set()
        for block_hash in self._pins.hashes():
            block_id = self._by_hash.get(block_hash)
            if len(chosen) == self.max_pinned:
                break
            if block_id is None or (block_id in self._evictable and room <= 0):
                continue
            room -= block_id in self._evictable
            chosen.add(block_id)
        for block_id in self._kept - chosen:
            self._kept.discard(block_id)
            self._evictable[block_id] = None
        self._pinned = chosen
        for block_id in chosen:
            if block_id in self._evictable:
                del self._evictable[block_id]
                self._kept.add(block_id)

    # ── books ──

    def ledger(self) -> BlockLedger:
        from_cached = max(0, self._num_promised - len(self._free))
        return BlockLedger(
            free=len(self._free) - self._num_promised + from_cached,
            cached=len(self._evictable) - from_cached,
            held=self._num_held,
            in_flight=self._num_in_flight,
            promised=self._num_promised,
            pinned=len(self._kept),
        )

    def check(self) -> None:
        """Asserts that ids and counts agree; O(num_blocks)."""
        ledger = self.ledger()
        assert self.available >= 0, ledger
        uses = list(zip(self._num_refs, self._num_copies, strict=True))
        assert sum(refs > 0 for refs, _ in uses) == self._num_held, ledger
        assert sum(self._num_refs) == self._num_references, ledger
        assert sum(not refs and copies > 0 for refs, copies in uses) == self._num_in_flight, ledger
        resting = [*self._free, *self._evictable, *self._kept]
        assert len(set(resting)) == len(resting), "an id is free twice"
        assert all(uses[block_id] == (0, 0) for block_id in resting), ledger
        assert len(resting) + self._num_held + self._num_in_flight == self.num_blocks, ledger
        assert all(self._hashes[block_id] is None for block_id in self._free), "free, but cached"
        hashes = {h: BlockId(i) for i, h in enumerate(self._hashes) if h is not None}
        assert hashes == self._by_hash, "hashes and ids disagree"
        assert all(self._hashes[block_id] is not None for block_id in self._evictable), ledger
        assert self._kept == {one for one in self._pinned if uses[one] == (0, 0)}, ledger
        assert len(self._pinned) <= self.max_pinned, ledger

    def _pop(self, num_blocks: int) -> list[BlockId]:
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._add_reference(block_id)
        return block_ids

    def _evict(self) -> BlockId:
        block_id, _ = self._evictable.popitem(last=False)
        block_hash, self._hashes[block_id] = self._hashes[block_id], None
        assert block_hash is not None, block_id
        del self._by_hash[block_hash]
        self.journal.removed(block_hash)
        return block_id

    def _add_reference(self, block_id: BlockId) -> None:
        if not self._num_refs[block_id]:
            self._num_held += 1
            self._num_in_flight -= self._num_copies[block_id] > 0
        self._num_refs[block_id] += 1
        self._num_references += 1

    def _drop_reference(self, block_id: BlockId) -> None:
        assert self._num_refs[block_id] > 0, block_id
        self._num_refs[block_id] -= 1
        self._num_references -= 1
        if self._num_refs[block_id]:
            return
        self._num_held -= 1
        if self._num_copies[block_id]:
            self._num_in_flight += 1
        else:
            self._rest(block_id)

    def _rest(self, block_id: BlockId) -> None:
        """Nobody uses it any more."""
        if self._hashes[block_id] is None:
            self._free.append(block_id)
        elif block_id in self._pinned:
            self._kept.add(block_id)
        else:
            self._evictable[block_id] = None
