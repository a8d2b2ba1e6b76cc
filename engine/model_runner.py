"""One step of tensor work: scheduled sequences in, sampled token ids out.

1. Their tokens and block tables become one `BatchInput` on the device, and are told to the other
   ranks, if several compute the model together.
2. The model writes their KV and gives logits for those that sample; the copier is told, so that
   copies wait for this forward and not for the next.
3. The sampler chooses on the device; reading the token ids, with the logprobs of whoever wants
   them, is the step's one wait for it. A step that has nothing to tell does not wait at all: on
   CUDA the next one is queued behind it. With other ranks every step is waited for: what is told
   of it then is true of their KV too.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import BatchInput, BatchRow, PackedBatch
from engine.decode_batch import DecodeBatches
from engine.decoder import Decoder
from engine.errors import OutOfDeviceMemory
from engine.grammars import Grammars, MaskFill
from engine.kv_cache import KVCache
from engine.kv_copier import KVCopier
from engine.kv_lease import KVLease
from engine.layer_groups import LayerGroups, group_ends
from engine.logit_rules import Words
from engine.logprobs import StepLogprobs
from engine.prompt_logprobs import PromptLogprobsRows
from engine.sampler import SampleRow
from engine.scheduled_batch import BlockCopy, StepOutput, sampling
from engine.sequence import Sequence
from engine.tp.ranks import ALONE, Ranks

_NOTHING_TOLD = PromptLogprobsRows(())


class Runner(Protocol):
    """What the engine loop needs from the tensor side; the tests have one without tensors."""

    @property
    def is_async(self) -> bool:
        """A `run` that samples nothing may return before the device is done."""

    def start(self) -> None:
        """First call on the engine thread."""

    def run(
        self, seqs: list[Sequence], on_layers: Callable[[int], None] | None = None
    ) -> StepOutput:
        """Computes the scheduled tokens; a token for each that samples, in order. `on_layers` may
        be told on the way that their KV of the first so many layers may be copied. Raises
        OutOfDeviceMemory; any other exception means that the device or the code is broken."""

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Behind what was run and waited for, before what comes: no target is a source."""

    def wait_for_copies(self, lease: KVLease) -> None:
        """What was copied under `lease` is seen by the next `run`."""


class ModelRunner:
    """A `Runner` of one model on one device. Engine thread only, but for the constructor."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        copier: KVCopier,
        grammars: Grammars,
        ranks: Ranks = ALONE,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_started` is called at the end of `start`."""
        self._model = model
        self._kv_cache = kv_cache
        self._copier = copier
        self._grammars = grammars
        self._device = kv_cache.device
        self._ranks = ranks
        self._on_cuda = self._device.type == "cuda"
        self._decode_batches = (
            DecodeBatches(kv_cache.block_size)
            if self._device.type == "cpu" and not ranks.are_there
            else None
        )
        self._on_started = on_started
        self.is_async = self._on_cuda and not ranks.are_there

    def start(self) -> None:
        if self._model.num_torch_threads is not None:
            torch.set_num_threads(self._model.num_torch_threads)  # OpenMP keeps it by thread
        if self._on_cuda:
            torch.cuda.set_device(self._device)
        self._on_started()

    def run(
        self, seqs: list[Sequence], on_layers: Callable[[int], None] | None = None
    ) -> StepOutput:
        try:
            output = self._run(seqs, self._groups(seqs, on_layers))
            self._ranks.check()
            return output
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) and not self._ranks.are_there:
                raise OutOfDeviceMemory(str(error)) from error
            raise self._ranks.explain(error) from error  # ranks are out of step: the end

    @torch.inference_mode()
    def _run(self, seqs: list[Sequence], groups: LayerGroups | None) -> StepOutput:
        drawn = sampling(seqs)
        masks = self._begin_masks(drawn)
        batch = self._batch(seqs)
        logits, hidden = self._model.forward(batch, self._kv_cache, groups)
        self._copier.record_compute()
        told = PromptLogprobsRows(seqs) if len(batch.prompt_indices) else _NOTHING_TOLD
        if not drawn and not told.num_rows:
            self._ranks.wait(self._device)
            return StepOutput([])
        if len(drawn) > len(logits):
            logits = logits[_logits_rows(seqs)]
        words = iter(masks.result() if masks is not None else ())
        rows = [_sample_row(seq, next(words) if seq.grammar else None) for seq in drawn]
        sampler = self._model.sampler
        counts = [row.params.num_logprobs for row in rows]
        logprobs = StepLogprobs(logits, counts, sampler.logprob_table)
        packed = logprobs.pack(sampler.sample_tokens(logits, rows))
        if told.num_rows:
            prompt_logits = partial(self._prompt_logits, hidden, batch)
            packed = torch.cat((packed.int(), told.pack(prompt_logits, batch)))
        read = packed.cpu().numpy()  # sync point
        num_own = len(read) - told.num_words
        own, prompts = read[:num_own], read[num_own:]
        token_ids = own[: len(rows)].tolist()  # host memory
        return StepOutput(token_ids, logprobs.unpack(own), told.unpack(prompts))

    def _batch(self, seqs: list[Sequence]) -> BatchInput:
        """On the device, and told to the other ranks."""
        if self._decode_batches is not None:
            batch = self._decode_batches.build(seqs)
            if batch is not None:
                return batch
        rows = [_batch_row(seq) for seq in seqs]
        packed = PackedBatch.of(rows, self._kv_cache.block_size, self._on_cuda)
        self._ranks.forward(packed)
        return packed.to(self._device)

    def _groups(
        self, seqs: list[Sequence], on_layers: Callable[[int], None] | None
    ) -> LayerGroups | None:
        if on_layers is None:
            return None
        if self._ranks.are_there and self._on_cuda:  # theirs would have to be known of too
            return None  # on the CPU the sum that ends a layer tells that each has written its KV

        def tell(num_layers: int) -> None:
            self._copier.record_compute()  # copies asked for from now on wait for these layers
            on_layers(num_layers)

        num_tokens = sum(seq.num_scheduled_tokens for seq in seqs)
        return LayerGroups(group_ends(self._kv_cache.data.shape[0], num_tokens), tell)

    def _prompt_logits(self, hidden: Tensor, batch: BatchInput, rows: slice) -> Tensor:
        self._ranks.prompt_logits(rows)
        return self._model.logits(hidden[batch.prompt_indices[rows]])

    def _begin_masks(self, drawn: list[Sequence]) -> MaskFill | None:
        """They are filled while the model runs."""
        constrained = [
            (seq.grammar, seq.output_token_ids()[seq.grammar.num_taken :].tolist())  # host memory
            for seq in drawn
            if seq.grammar is not None
        ]
        return self._grammars.begin(constrained) if constrained else None

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        self._ranks.copy_blocks(copies)
        self._kv_cache.copy_blocks(copies)
        self._copier.record_compute()  # what is copied from now on comes behind it

    def wait_for_copies(self, lease: KVLease) -> None:
        self._copier.wait_scatters(lease)


def _batch_row(seq: Sequence) -> BatchRow:
    computed = seq.num_computed_tokens
    row = BatchRow(seq.scheduled_token_ids(), computed, seq.block_ids(), seq.samples_next)
    prompt_rows = seq.told_prompt_rows()
    if not prompt_rows:
        return row
    first = computed + 1 + prompt_rows.start
    next_token_ids = seq.token_ids[first : first + len(prompt_rows)]
    return row._replace(prompt_rows=prompt_rows, next_token_ids=next_token_ids)


def _logits_rows(seqs: list[Sequence]) -> list[int]:
    """Row of the logits for each that takes a token: samples that fork share one."""
    sizes = [len(seq.drawn) for seq in seqs if seq.samples_next]
    return [row for row, size in enumerate(sizes) for _ in range(size)]


def _sample_row(seq: Sequence, words: Words | None) -> SampleRow:
    request, rules = seq.request, seq.logit_rules
    if rules is not None:
        rules.catch_up(seq.output_token_ids())
    return SampleRow(request.sampling, request.sample, seq.num_output_tokens, rules, words)
