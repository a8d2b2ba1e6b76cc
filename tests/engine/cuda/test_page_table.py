"""Pages of a batch's rows, against counting them one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.page_table import padded, page_table

SPARE = 99
"""A block that no row has."""


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Block tables, some with room to grow; tokens of each row; block size."""
    block_size = draw(st.sampled_from((1, 4, 16, 64)))
    seq_lens = draw(st.lists(st.integers(1, 200), min_size=1, max_size=6))
    tables = []
    for seq_len in seq_lens:
        num_blocks = -(-seq_len // block_size) + draw(st.integers(0, 2))
        tables.append(draw(st.lists(st.integers(0, 50), min_size=num_blocks, max_size=num_blocks)))
    return tables, seq_lens, block_size


def as_array(tables: list[list[int]]) -> np.ndarray:
    width = max(map(len, tables))
    return np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int64)


@given(batches(), st.integers(0, 5))
def test_rows_have_the_pages_of_their_tokens(
    batch: tuple[list[list[int]], list[int], int], num_more: int
) -> None:
    tables, seq_lens, block_size = batch
    table = page_table(as_array(tables), seq_lens, block_size)
    table = padded(table, len(tables) + num_more, SPARE)
    wanted = [*zip(tables, seq_lens, strict=True), *[([SPARE], 1)] * num_more]
    assert len(table.last_page_len) == len(wanted)
    assert table.indptr[-1] == len(table.indices)
    for row, (blocks, seq_len) in enumerate(wanted):
        pages = table.indices[table.indptr[row] : table.indptr[row + 1]].tolist()
        slots = [page * block_size + offset for page in pages for offset in range(block_size)]
        unused = block_size - int(table.last_page_len[row])
        expected = [blocks[t // block_size] * block_size + t % block_size for t in range(seq_len)]
        assert slots[: len(slots) - unused] == expected
        assert 0 <= unused < block_size
