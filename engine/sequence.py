"""`Sequence`: one sample of a request on one engine, as three counters over its tokens.

    0 ......... num_computed_tokens ......... num_tokens          positions
    [ KV is in the blocks )[ num_scheduled_tokens of these next )

There are no phases: a step computes some of the tokens that are not computed yet, and samples
when none is left. A prompt, a resumed tail and a preempted sequence are all uncomputed tokens; a
hit in the prefix cache lets `num_computed_tokens` start behind it, and a transfer moves it over the
prompt. Engine thread only; no tensors.
"""

from enum import Enum

import numpy as np
import numpy.typing as npt

from engine.kv_lease import KVLease
from engine.logit_rules import LogitRules
from engine.request import BlockId, EngineRequest, FinishReason, Leg
from engine.sample_grammar import SampleGrammar
from engine.swap_space import Swap
from runtime.block_hash import BlockHash


class Status(Enum):
    WAITING = "waiting"
    """Holds nothing: new, preempted, or its reservation was lost."""
    AWAITING_KV = "awaiting_kv"
    """Has a promise, or the blocks it was redeemed for; its KV has not come."""
    SWAPPING_IN = "swapping_in"
    """Holds blocks for all its tokens; KV that it had computed is copied back into them."""
    FORKING = "forking"
    """Holds nothing yet: its prompt is another sample's, from which it will fork."""
    RUNNING = "running"
    """Holds blocks for all its tokens and takes part in steps."""
    HELD = "held"
    """A prefill leg that is computed; its blocks stay until it is aborted."""
    ENDED = "ended"
    """Holds nothing, for good."""


class Sequence:
    """See the module. The scheduler alone writes it, but for the two times."""

    __slots__ = (
        "_block_ids",
        "_num_block_ids",
        "arrival",
        "awaits_grammar",
        "awaits_transfer",
        "block_hashes",
        "block_table",
        "draws_forks",
        "end_token_ids",
        "finish_reason",
        "first_scheduled_ns",
        "forks",
        "grammar",
        "is_prefill_leg",
        "lease",
        "logit_rules",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_ever_computed_tokens",
        "num_expected_hits",
        "num_forked_tokens",
        "num_named_blocks",
        "num_promised_blocks",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "num_tokens",
        "num_tokens_arrived",
        "request",
        "request_id",
        "status",
        "submitted_ns",
        "swap",
        "token_ids",
        "was_preempted",
    )

    def __init__(
        self,
        request: EngineRequest,
        arrival: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        submitted_ns: int = 0,
    ) -> None:
        sampling, prompt = request.sampling, request.prompt_token_ids
        self.request = request
        self.request_id = request.request_id
        self.arrival = arrival
        """Age: the order of submission, kept over preemptions."""
        self.is_prefill_leg = request.leg is Leg.PREFILL
        self.awaits_transfer = request.leg is Leg.DECODE
        """The prompt's KV comes from another worker and has not come."""
        self.end_token_ids = request.end_token_ids(eos_token_ids)
        self.logit_rules = LogitRules.of(sampling, prompt, self.end_token_ids)
        """What the sampler must know of the tokens so far; None: nothing."""
        self.grammar: SampleGrammar | None = None
        """What may come next, if the request says; there when it is compiled."""
        samples = not (self.is_prefill_leg and request.output_token_ids)
        self.awaits_grammar = samples and bool(sampling.grammar)
        """It is being compiled: no token can be sampled yet."""

        tokens = prompt if self.is_prefill_leg else prompt + request.output_token_ids
        # Prompt and outputs, when it ends for length.
        self.max_num_tokens = min(max_model_len, len(prompt) + sampling.max_tokens)
        capacity = len(prompt) + 1 if self.is_prefill_leg else self.max_num_tokens
        self.token_ids = _array(tokens, capacity)
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(tokens)
        self.num_computed_tokens = self.num_scheduled_tokens = 0
        self.num_ever_computed_tokens = 0
        """`num_computed_tokens` when its blocks were last given up, or more."""

        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.block_table: list[BlockId] = []
        """A new list after each time the blocks were given up: an old lease keeps the old one."""
        self.num_promised_blocks = 0
        self.num_cached_tokens = 0
        """Found in the prefix cache when it last came in; whole blocks."""
        self.num_expected_hits = self.num_tokens_arrived = 0  # see engine/prefill_order.py
        self.num_named_blocks = 0
        """So many of the first blocks were offered to the prefix cache, or came from it."""
        self.block_hashes: list[BlockHash] = []
        """Of its first full blocks, as far as anybody has asked; kept over preemptions."""
        self.forks: list[Sequence] = []  # other samples, until they fork from it (engine/fork.py)
        self.draws_forks = False  # their token 0 is drawn from the same logits as its own
        self.num_forked_tokens = 0  # of one that forks: it has their KV from the other then
        self.was_preempted = False
        self.swap: Swap | None = None  # what it had computed when it gave way, if that is kept
        self.lease: KVLease | None = None
        """Open while it may copy into or out of `block_table`."""
        self._block_ids: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._num_block_ids = 0
        self.submitted_ns = submitted_ns
        self.first_scheduled_ns = 0
        """Set by the engine; 0 is not yet."""

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_ready_tokens(self) -> int:
        """Of the uncomputed ones; the last waits for the grammar, for a token will follow it (with
        those that are to fork, for all of theirs)."""
        awaits = self.awaits_grammar
        if self.draws_forks:
            awaits = any(seq.awaits_grammar for seq in self.drawn)
        return self.num_uncomputed_tokens - awaits

    @property
    def drawn(self) -> "list[Sequence]":
        """The samples that take a token each from its next logits."""
        return [self, *self.forks] if self.draws_forks else [self]

    @property
    def num_slots(self) -> int:
        """Sequences that its coming in makes run, sooner or later."""
        return 1 if self.is_prefill_leg else 1 + len(self.forks)

    @property
    def samples_next(self) -> bool:
        """The scheduled tokens are the last uncomputed ones, and a token is to follow them. A
        prefill leg whose outputs are delivered only computes its prompt."""
        return self.num_scheduled_tokens == self.num_uncomputed_tokens and not (
            self.is_prefill_leg and self.request.output_token_ids
        )

    def scheduled_token_ids(self) -> npt.NDArray[np.int64]:
        """[num_scheduled_tokens], a view."""
        start = self.num_computed_tokens
        return self.token_ids[start : start + self.num_scheduled_tokens]

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that may be found in the prefix cache instead of computed. One is left, for
        somebody must be sampled from; and all whose logits are still to be told of."""
        if self.request.sampling.num_prompt_logprobs:
            return min(self.num_tokens - 1, self.num_ever_computed_tokens)
        return self.num_tokens - 1

    def told_prompt_rows(self) -> range:
        """Offsets of the scheduled tokens whose logits say how likely the next prompt token was,
        if that is wanted and has not been told before."""
        if not self.request.sampling.num_prompt_logprobs:
            return range(0)
        start = self.num_computed_tokens
        first = max(start, self.num_ever_computed_tokens)
        end = min(start + self.num_scheduled_tokens, self.num_prompt_tokens - 1)
        return range(first - start, max(first, end) - start)

    def output_token_ids(self) -> npt.NDArray[np.int64]:
        """[num_output_tokens], a view."""
        return self.token_ids[self.num_prompt_tokens : self.num_tokens]

    def append(self, token_id: int) -> None:
        """An output token; decides whether it is the last one."""
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        if token_id in self.end_token_ids:
            self.finish_reason = FinishReason.STOP
        elif self.num_tokens >= self.max_num_tokens:
            self.finish_reason = FinishReason.LENGTH

    def block_ids(self) -> npt.NDArray[np.int64]:
        """[len(block_table)], a view; converts only what was appended since the last call."""
        done, total = self._num_block_ids, len(self.block_table)
        if done != total:
            if total > len(self._block_ids):
                grown = np.empty(max(16, 2 * total), dtype=np.int64)
                grown[:done] = self._block_ids[:done]
                self._block_ids = grown
            self._block_ids[done:total] = self.block_table[done:]
            self._num_block_ids = total
        return self._block_ids[:total]

    def drop_blocks(self) -> list[BlockId]:
        """The block table, which is not this sequence's any more; nothing is computed now."""
        ever_computed = max(self.num_ever_computed_tokens, self.num_computed_tokens)
        self.num_ever_computed_tokens = ever_computed
        dropped, self.block_table = self.block_table, []
        self._num_block_ids = self.num_named_blocks = self.num_cached_tokens = 0
        self.num_computed_tokens = self.num_scheduled_tokens = 0
        return dropped


def _array(token_ids: tuple[int, ...], capacity: int) -> npt.NDArray[np.int64]:
    """[capacity], with room behind the tokens."""
    array: npt.NDArray[np.int64] = np.empty(capacity, dtype=np.int64)
    array[: len(token_ids)] = token_ids
    return array
