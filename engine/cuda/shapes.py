"""Which step shapes are captured, and which of them a step takes. Pure.

A captured step has so many rows and so many blocks a row; smaller ones are padded to it.
"""

from collections.abc import Iterable
from typing import NamedTuple

_FEW_TOKENS = 512
"""The shortest block tables that get a graph of their own."""


class Shape(NamedTuple):
    """The widest step of one token a sequence that a graph is good for."""

    num_seqs: int
    num_blocks: int
    """Of each sequence."""


def batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8 and then every eighth, and the largest: at most 7 rows of padding."""
    few = [size for size in (1, 2, 4) if size < max_num_seqs]
    return [*few, *range(8, max_num_seqs, 8), max_num_seqs]


def block_counts(max_blocks: int, block_size: int) -> list[int]:
    """Powers of two times 512 tokens, and the largest: padded tables are less than twice as long
    as they must be, beyond the first."""
    counts, count = [], -(-_FEW_TOKENS // block_size)
    while count < max_blocks:
        counts.append(count)
        count *= 2
    return [*counts, max_blocks]


def find(shapes: Iterable[Shape], num_seqs: int, num_blocks: int) -> Shape | None:
    """The least that holds so much; fewer rows before fewer blocks."""
    wide = (s for s in shapes if s.num_seqs >= num_seqs and s.num_blocks >= num_blocks)
    return min(wide, default=None)
