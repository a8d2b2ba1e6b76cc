"""Block tables as FlashInfer wants them: the pages of all rows, end to end.

Pure, on the host. A page is a block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class PageTable(NamedTuple):
    """Row r has pages indices[indptr[r] : indptr[r + 1]]; all are full, but for the last one."""

    indptr: Ints  # [R + 1]
    indices: Ints  # [indptr[R]]
    last_page_len: Ints  # [R] tokens in the last page, 1 to block_size


def page_table(block_tables: Ints, seq_lens: Sequence[int], block_size: int) -> PageTable:
    """block_tables [R, max_blocks], padded and perhaps with room to grow → the pages that hold the
    `seq_lens` [R] tokens, none of them 0."""
    lens = np.asarray(seq_lens, dtype=np.int64)
    num_pages = -(-lens // block_size)
    is_used = np.arange(block_tables.shape[1]) < num_pages[:, None]  # [R, max_blocks]
    return PageTable(
        indptr=np.concatenate((_ZERO, np.cumsum(num_pages))),
        indices=block_tables[is_used],
        last_page_len=lens - (num_pages - 1) * block_size,
    )


def padded(table: PageTable, num_rows: int, page: int) -> PageTable:
    """With rows of one token in `page` behind it, `num_rows` in all."""
    missing = np.arange(1, num_rows - len(table.last_page_len) + 1)
    return PageTable(
        indptr=np.concatenate((table.indptr, table.indptr[-1] + missing)),
        indices=np.concatenate((table.indices, np.full(len(missing), page))),
        last_page_len=np.concatenate((table.last_page_len, np.ones_like(missing))),
    )


_ZERO: Ints = np.zeros(1, dtype=np.int64)
_NONE: Ints = np.empty(0, dtype=np.int64)
NO_PAGES = PageTable(_ZERO, _NONE, _NONE)
"""Of no rows."""
