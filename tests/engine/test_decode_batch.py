"""Batches of lone tokens are what `PackedBatch` makes of the same sequences, from step to step."""

import random
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import BatchInput, BatchRow
from engine.decode_batch import DecodeBatches
from engine.request import BlockId, Leg
from engine.sequence import Sequence
from tests.engine.requests import make_request

BLOCK_SIZE = 4


def running(draw: random.Random, serial: int) -> Sequence:
    """A sequence that is about to compute its last token."""
    prompt_len = draw.randint(1, 20)
    seq = Sequence(make_request(str(serial), prompt_len, max_tokens=60), serial, 100)
    come_in(seq, draw)
    return seq


def come_in(seq: Sequence, draw: random.Random) -> None:
    """Into blocks of its own, all but the last token computed."""
    num_blocks = -(-seq.num_tokens // BLOCK_SIZE)
    seq.block_table.extend(BlockId(draw.randrange(500)) for _ in range(num_blocks))
    seq.num_computed_tokens = seq.num_tokens - 1


def go_on(seq: Sequence, draw: random.Random) -> None:
    """A step was done, the next is scheduled."""
    seq.num_computed_tokens += 1
    seq.append(draw.randrange(1000))
    if seq.num_tokens > len(seq.block_table) * BLOCK_SIZE:
        seq.block_table.append(BlockId(draw.randrange(500)))
    seq.num_scheduled_tokens = 1


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return np.array_equal(one, other)


@pytest.mark.parametrize("seed", range(10))
def test_they_are_packed_ones(seed: int) -> None:
    draw = random.Random(seed)
    batches, seqs = DecodeBatches(BLOCK_SIZE), [running(draw, i) for i in range(5)]
    for serial in range(5, 45):
        chance = draw.random()
        if chance < 0.1 and len(seqs) > 1:
            seqs.pop(draw.randrange(len(seqs)))
        elif chance < 0.2:
            seqs.insert(draw.randrange(len(seqs)), running(draw, serial))
        elif chance < 0.3:  # it gave way and came back, perhaps into as many blocks
            seqs[0].drop_blocks()
            come_in(seqs[0], draw)
        for seq in seqs:
            go_on(seq, draw)
        built = batches.build(seqs)
        rows = [
            BatchRow(seq.scheduled_token_ids(), seq.num_computed_tokens, seq.block_ids(), True)
            for seq in seqs
        ]
        packed = BatchInput.build(rows, BLOCK_SIZE, torch.device("cpu"))
        for field in fields(BatchInput):
            ours, theirs = (getattr(batch, field.name) for batch in (built, packed))
            assert same(ours, theirs), field.name


def test_other_steps_are_not_its_business() -> None:
    draw = random.Random(0)
    batches, seqs = DecodeBatches(BLOCK_SIZE), [running(draw, i) for i in range(3)]
    for seq in seqs:
        seq.num_scheduled_tokens = 1
    assert batches.build(seqs) is not None
    seqs[1].num_computed_tokens -= min(1, seqs[1].num_computed_tokens)
    seqs[1].num_scheduled_tokens = 2
    assert batches.build(seqs) is None, "a chunk"
    seqs[1].num_scheduled_tokens = 1
    if seqs[1].num_uncomputed_tokens > 1:
        assert batches.build(seqs) is None, "nothing is sampled"
    request = make_request("resumed", 5, leg=Leg.PREFILL, outputs=(3,))
    leg = Sequence(request, 9, 100)
    come_in(leg, draw)
    leg.num_scheduled_tokens = 1
    assert batches.build([leg]) is None, "delivered outputs: it only computes its prompt"
