import numpy as np
import torch

from engine.batch import BatchInput, BatchRow


def row(tokens: list[int], computed: int, blocks: list[int], wants_logits: bool) -> BatchRow:
    return BatchRow(
        np.array(tokens, dtype=np.int64), computed, np.array(blocks, dtype=np.int64), wants_logits
    )


def test_ragged_batch() -> None:
    batch = BatchInput.build(
        [
            row([7], 5, [3, 9], True),
            row([1, 2, 3], 0, [4], False),
            row([8, 9], 3, [5, 6, 2], True),
        ],
        block_size=4,
        device=torch.device("cpu"),
    )
    assert batch.input_ids.tolist() == [7, 1, 2, 3, 8, 9]
    assert batch.positions.tolist() == [5, 0, 1, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [37, 16, 17, 18, 23, 24]
    assert batch.block_tables.tolist() == [[3, 9, 0], [4, 0, 0], [5, 6, 2]]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4, 6]
    assert batch.seq_lens.tolist() == [6, 3, 5]
    assert batch.seqlens_q_host == (1, 3, 2)
    assert batch.seq_lens_host == (6, 3, 5)
    assert batch.logits_indices.tolist() == [0, 5]
    assert batch.cu_seqlens_q.dtype == batch.seq_lens.dtype == torch.int32
    assert batch.input_ids.dtype == batch.block_tables.dtype == torch.int64


def test_no_logits_wanted() -> None:
    batch = BatchInput.build([row([1], 0, [0], False)], 16, torch.device("cpu"))
    assert batch.logits_indices.shape == (0,)


def test_rows_that_tell_of_prompt_tokens() -> None:
    ids = np.array([1, 2, 3], dtype=np.int64)
    telling = BatchRow(ids, 4, np.array([3, 9]), True, range(1, 3), np.array([3, 8]))
    batch = BatchInput.build(
        [row([7], 5, [3, 9], True), telling, row([8, 9], 3, [5, 6, 2], False)],
        block_size=4,
        device=torch.device("cpu"),
    )
    assert batch.logits_indices.tolist() == [0, 3]
    assert batch.prompt_indices.tolist() == [2, 3]
    assert batch.prompt_token_ids.tolist() == [3, 8]
    assert batch.seq_lens.tolist() == [6, 7, 5]
