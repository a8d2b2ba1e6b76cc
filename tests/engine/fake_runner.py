"""A `Runner` without tensors whose KV is token ids: it proves that each step reads what was
written for its own sequence, through the block table, and nothing else."""

import threading
from collections.abc import Callable

from engine.kv_lease import KVLease
from engine.request import BlockId, EngineRequest
from engine.scheduled_batch import BlockCopy, StepOutput
from engine.sequence import Sequence

VOCAB_SIZE = 1000


def next_token(token_ids: tuple[int, ...], seed: int) -> int:
    """What the fake model answers to a sequence."""
    state = seed + 1
    for token_id in token_ids:
        state = (state * 31 + token_id) % 1_000_003
    return state % VOCAB_SIZE


def expected_tokens(request: EngineRequest) -> tuple[int, ...]:
    """The request's output tokens, all of them, by the fake model alone; stop ids not heeded."""
    tokens = request.prompt_token_ids
    seed = request.sampling.seed + 7 * request.sample
    for _ in range(request.sampling.max_tokens):
        tokens += (next_token(tokens, seed),)
    return tokens[len(request.prompt_token_ids) :]


def _seed(seq: Sequence) -> int:
    return seq.request.sampling.seed + 7 * seq.request.sample


class FakeRunner:
    """See the module."""

    is_async = False

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[BlockId, int], int] = {}
        self.before_step: Callable[[list[Sequence]], None] = lambda seqs: None
        self.waited: list[KVLease] = []
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        self.thread = threading.current_thread()

    def run(
        self, seqs: list[Sequence], on_layers: Callable[[int], None] | None = None
    ) -> StepOutput:
        assert threading.current_thread() is self.thread
        self.before_step(seqs)
        token_ids = []
        for seq in seqs:
            start = seq.num_computed_tokens
            self.write(seq.block_table, start, [int(t) for t in seq.scheduled_token_ids()])
            known = self.read(seq.block_table, start + seq.num_scheduled_tokens)
            assert known == tuple(seq.token_ids[: len(known)]), "another sequence's KV"
            if seq.samples_next:
                token_ids += [next_token(known, _seed(one)) for one in seq.drawn]
        return StepOutput(token_ids)

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        for source, target in copies:
            for offset in range(self.block_size):
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]

    def wait_for_copies(self, lease: KVLease) -> None:
        self.waited.append(lease)

    def write(self, block_table: list[BlockId], start: int, token_ids: list[int]) -> None:
        for position, token_id in enumerate(token_ids, start):
            self.slots[self._slot(block_table, position)] = token_id

    def read(self, block_table: list[BlockId], count: int) -> tuple[int, ...]:
        return tuple(self.slots[self._slot(block_table, position)] for position in range(count))

    def _slot(self, block_table: list[BlockId], position: int) -> tuple[BlockId, int]:
        return block_table[position // self.block_size], position % self.block_size
