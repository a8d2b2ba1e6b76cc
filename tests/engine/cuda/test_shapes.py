"""Which graphs there are, and which one a step takes."""

from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.shapes import Shape, batch_sizes, block_counts, find


def test_few_sizes() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(21) == [1, 2, 4, 8, 16, 21]
    assert batch_sizes(64) == [1, 2, 4, *range(8, 65, 8)]
    assert block_counts(10, 16) == [10]
    assert block_counts(512, 16) == [32, 64, 128, 256, 512]
    assert block_counts(100, 16) == [32, 64, 100]


@given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from((1, 4, 16, 64)), st.data())
def test_every_step_finds_the_least_that_holds_it(
    max_num_seqs: int, max_blocks: int, block_size: int, data: st.DataObject
) -> None:
    sizes, counts = batch_sizes(max_num_seqs), block_counts(max_blocks, block_size)
    assert sizes == sorted(set(sizes))
    assert counts == sorted(set(counts))
    shapes = [Shape(size, count) for size in sizes for count in counts]
    num_seqs = data.draw(st.integers(1, max_num_seqs))
    num_blocks = data.draw(st.integers(1, max_blocks))
    shape = find(shapes, num_seqs, num_blocks)
    assert shape is not None
    assert num_seqs <= shape.num_seqs < max(num_seqs + 8, 2 * num_seqs)
    assert num_blocks <= shape.num_blocks < max(2 * num_blocks, 512 // block_size + 1)


@given(st.integers(1, 10), st.integers(1, 10))
def test_none_is_taken_that_is_too_small(num_seqs: int, num_blocks: int) -> None:
    found = find([Shape(4, 2), Shape(2, 8)], num_seqs, num_blocks)
    fits = (num_seqs <= 4 and num_blocks <= 2) or (num_seqs <= 2 and num_blocks <= 8)
    assert (found is not None) == fits
