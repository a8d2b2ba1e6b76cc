"""An index of a worker's cache is what its journal says, or is known to be void."""

from hypothesis import given
from hypothesis import strategies as st

from engine.cache_journal import CacheJournal, Changes
from protos import serving_pb2 as pb
from router.prefix_index import PrefixIndex, PromptBlocks
from runtime.block_hash import BlockHash, block_hash, root_hash, short_hash

BLOCKS = [BlockHash(bytes([i]) * 32) for i in range(12)]
ROOM = len(BLOCKS)


def message(changes: Changes) -> pb.CacheChanges:
    return pb.CacheChanges(
        first_change=changes.first,
        next_change=changes.next,
        is_snapshot=changes.is_snapshot,
        stored=changes.stored,
        removed=changes.removed,
    )


@given(st.lists(st.tuples(st.integers(0, ROOM - 1), st.booleans(), st.booleans(), st.booleans())))
def test_whoever_hears_the_journal_knows_what_is_cached(
    history: list[tuple[int, bool, bool, bool]],
) -> None:
    """Also where messages are lost, or the journal does not reach back to what was heard last."""
    journal, index, present = CacheJournal(max_changes=5), PrefixIndex(), set[int]()
    heard: int | None = None
    for number, is_stored, is_told, is_lost in history:
        name = BLOCKS[number]
        if is_stored:
            journal.stored(name)
            present.add(short_hash(name))
        else:
            journal.removed(name)
            present.discard(short_hash(name))
        if not is_told:
            continue
        told = journal.since(heard)
        heard = told.next
        if is_lost:
            continue
        if not index.apply(7, message(told), ROOM):  # a gap: who missed something says so
            assert len(index) == 0
            told = journal.since(None)
            heard = told.next
            assert index.apply(7, message(told), ROOM)
        assert {short_hash(b) for b in BLOCKS if index.num_cached([short_hash(b)])} == present


def test_another_process_is_not_believed() -> None:
    index = PrefixIndex()
    assert index.apply(1, pb.CacheChanges(is_snapshot=True, next_change=3, stored=[1, 2]), ROOM)
    assert not index.apply(2, pb.CacheChanges(first_change=3, next_change=4, stored=[5]), ROOM)
    assert (len(index), index.generation, index.next_change) == (0, 0, 0)


def test_it_never_holds_more_than_the_worker_has_blocks() -> None:
    index = PrefixIndex()
    assert index.apply(1, pb.CacheChanges(is_snapshot=True, stored=range(100)), 8)
    assert len(index) == 8
    assert not index.apply(1, pb.CacheChanges(next_change=1, stored=range(200, 300)), 8)
    assert len(index) == 0


def test_a_prompt_is_named_as_workers_name_it_for_each_block_size() -> None:
    prompt = tuple(range(20))
    blocks = PromptBlocks(prompt, "salt")
    chain = list(blocks.of(b"kind", 4))
    for size, num_full in ((4, 4), (8, 2), (19, 1), (20, 0), (64, 0)):  # a token is left to compute
        parent, names = root_hash(b"kind", "salt"), []
        for start in range(0, num_full * size, size):
            parent = block_hash(parent, prompt[start : start + size])
            names.append(short_hash(parent))
        assert list(blocks.of(b"kind", size)) == names
        assert list(blocks.of(b"other", size)) != names or not names
    index = PrefixIndex()
    index.apply(1, pb.CacheChanges(is_snapshot=True, stored=chain[:2]), 9)
    assert blocks.num_cached_tokens(index, b"kind", 4) == 8
    assert blocks.num_cached_tokens(index, b"kind", 8) == 0
    assert PromptBlocks(prompt).num_cached_tokens(index, b"kind", 4) == 0  # another salt
