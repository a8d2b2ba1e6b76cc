"""The decoder on CPU cores: one call a step for the whole model, no tensor library inside.

Computes what engine/model.py does, for float32 and bfloat16 and head dimensions of whole vectors
(`unsupported` tells). The residual stream and everything between two products is float32. A token's
arithmetic does not depend on the tokens beside it.

1. `PanelModel.read` lays weights out as panels while they are read (panels.py).
2. `forward` turns the batch into plain arrays (plan.py) and has the team run the kernel over them.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig
from engine.cpu.forward import HEAD_REGIONS, forward, head, num_regions
from engine.cpu.jit import compiling
from engine.cpu.layout import Cache, Elements, Floats, Ints, Scratch, Shape, Step, Weights
from engine.cpu.panels import PanelStore, as_elements, bias_row, group_of, interleave, padded
from engine.cpu.plan import plan_step
from engine.cpu.sampler import KernelSampler
from engine.cpu.scratch import ScratchPool
from engine.cpu.simd import LANES
from engine.cpu.sync import new_counters
from engine.cpu.team import Team
from engine.kv_cache import KVCache
from engine.layer_groups import LayerGroups
from engine.model import ModelOutput
from engine.rope import rope_inv_freq
from engine.sampler import Sampler
from engine.weights import LayerWeights, Matrix, WeightReader

_DTYPES = (torch.float32, torch.bfloat16)
_Run = Callable[[Callable[[int], None]], None]

_ONE: Ints = np.zeros(1, dtype=np.int64)


def unsupported(config: ModelConfig, dtype: torch.dtype) -> str:
    """Why this model cannot run here; empty if it can."""
    if dtype not in _DTYPES:
        return f"the kernels know no {dtype}"
    for name, multiple in (("head_dim", 2 * LANES), ("hidden_size", LANES)):
        if getattr(config, name) % multiple:
            return f"{name} is {getattr(config, name)}, not a multiple of {multiple}"
    if config.intermediate_size % LANES:
        return f"intermediate_size is {config.intermediate_size}, not a multiple of {LANES}"
    return ""


class PanelModel:
    """See the module. Engine thread only, but for the constructor."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, weights: Weights, digest: bytes, team: Team
    ) -> None:
        """Takes the team over. Compiles, if that was not done before on this machine: seconds."""
        self.config = config
        self.digest = digest
        self.num_torch_threads: int | None = (
            1  # torch only samples; its own team would spin beside ours
        )
        self.weights_nbytes = sum(part.nbytes for part in weights if isinstance(part, np.ndarray))
        self._weights = weights
        self._team = team
        self._shape = Shape(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            group=group_of(dtype),
            has_head_norms=config.qk_norm,
        )
        self._inv_freq = rope_inv_freq(config.rope, config.head_dim).numpy()
        self._scratch = ScratchPool(self._shape, dtype, team.num_threads)
        with compiling(str(dtype)):
            self.sampler: Sampler = KernelSampler(config.vocab_size, team)
            self._compile(dtype)

    @classmethod
    def read(cls, reader: WeightReader, team: Team) -> "PanelModel":
        config = reader.config
        store = PanelStore(config, reader.dtype)
        embedding = reader.embedding()
        norms, head_norms, biases = [], [], []
        for layer in reader.layers():
            for matrix in _in_order(layer):
                store.add(matrix.weight)
            norms.append(torch.stack((layer.input_norm, layer.post_attention_norm)))
            head_norms.append(_head_norms(layer, config.head_dim))
            biases.append(bias_row([(m.bias, len(m.weight)) for m in _in_order(layer)]))
        norm = reader.norm()
        store.add(reader.lm_head().weight)
        weights = Weights(
            panels=store.elements,
            layer_stride=store.layer_stride,
            o_at=store.o_at,
            gate_up_at=store.gate_up_at,
            down_at=store.down_at,
            lm_head_at=store.lm_head_at,
            biases=np.stack(biases),
            lm_head_bias=np.zeros(padded(config.vocab_size), dtype=np.float32),
            norms=torch.stack(norms).float().numpy(),  # host memory, as the next
            head_norms=torch.stack(head_norms).float().numpy(),
            norm=norm.float().numpy(),
            embedding=as_elements(embedding),
            windows=np.array([window or 0 for window in config.windows], dtype=np.int64),
        )
        return cls(config, reader.dtype, weights, reader.digest(), team)

    def forward(
        self, batch: BatchInput, kv: KVCache, groups: LayerGroups | None = None
    ) -> ModelOutput:
        """Writes K and V of the batch's tokens into `kv`."""
        return self._compute(batch, kv, self._team.run, groups)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden], rows of what the last `forward` gave → [n, vocab] float32."""
        logits = self._head(hidden, self._team.run)
        return torch.from_numpy(logits).view(-1, self._shape.vocab)

    def prepare(self, kv: KVCache) -> None:
        """Nothing."""

    def close(self) -> None:
        self._team.close()

    def _compute(
        self, batch: BatchInput, kv: KVCache, run: _Run, groups: LayerGroups | None = None
    ) -> ModelOutput:
        step = plan_step(batch, self._shape, self._inv_freq)
        self._check(step, kv)
        elements = as_elements(kv.data).reshape(-1)
        cache = Cache(
            elements=elements,
            words=elements.view(np.uint32),
            plane=len(elements) // (2 * self._shape.num_layers),
            block_size=kv.block_size,
        )
        scratch = self._scratch.of(step)
        rows = self._scratch.rows(len(step.slots))
        regions = num_regions(self._shape.num_layers)
        arguments = (self._shape, self._weights, step, cache, scratch, rows)

        def compute(first: int, end: int, has_head: bool) -> None:
            counters = new_counters(regions, self._team.num_threads)
            run(partial(_run, counters, *arguments, first, end, has_head))

        first = 0
        if groups is not None:
            for first, end in pairwise((0, *groups.ends)):
                compute(first, end, False)
                groups.tell(end)
            first = groups.ends[-1]
        compute(first, self._shape.num_layers, True)
        hidden = torch.from_numpy(scratch.hidden)[: len(rows) * self._shape.hidden]
        return ModelOutput(
            torch.from_numpy(scratch.logits)[: len(step.logits_rows) * self._shape.vocab].view(
                -1, self._shape.vocab
            ),
            hidden.view(-1, self._shape.hidden),
        )

    def _check(self, step: Step, kv: KVCache) -> None:
        """What the kernels index with, for they look at no bounds."""
        assert _are_within(step.input_ids, self._shape.vocab), step.input_ids
        assert _are_within(step.block_tables, kv.num_blocks), step.block_tables
        assert _are_within(step.slots, kv.num_blocks * kv.block_size), step.slots
        assert step.seq_lens.max() <= step.block_tables.shape[1] * kv.block_size, step.seq_lens

    def _head(self, hidden: Tensor, run: _Run) -> Floats:
        """Of contiguous float32 rows on the host."""
        num_rows = len(hidden)
        logits: Floats = np.empty(num_rows * self._shape.vocab, dtype=np.float32)
        counters = new_counters(HEAD_REGIONS, self._team.num_threads)
        scratch = self._scratch.for_head(num_rows)
        rows, flat = self._scratch.rows(num_rows), hidden.contiguous().numpy().reshape(-1)
        run(partial(_run_head, counters, self._shape, self._weights, rows, flat, logits, *scratch))
        return logits

    def _compile(self, dtype: torch.dtype) -> None:
        """A step of one token; every step has the same types."""
        cpu = torch.device("cpu")
        row = BatchRow(_ONE, 0, np.zeros(1, dtype=np.int64), wants_logits=True)
        batch = BatchInput.build([row], 1, cpu)
        output = self._compute(batch, KVCache(self.config, 1, 1, dtype, cpu), self._run_alone)
        self._head(output.hidden, self._run_alone)

    def _run_alone(self, function: Callable[[int], None]) -> None:
        function(0)


def _run(
    counters: Ints,
    shape: Shape,
    weights: Weights,
    step: Step,
    cache: Cache,
    scratch: Scratch,
    rows: Ints,
    first_layer: int,
    end_layer: int,
    has_head: bool,
    thread: int,
) -> None:
    forward(
        counters, thread, shape, weights, step, cache, scratch, rows, first_layer, end_layer,
        has_head,
    )  # fmt: skip


def _run_head(
    counters: Ints,
    shape: Shape,
    weights: Weights,
    rows: Ints,
    hidden: Floats,
    logits: Floats,
    tiles: Elements,
    floats: Floats,
    elements: Elements,
    thread: int,
) -> None:
    head(counters, thread, shape, weights, rows, hidden, tiles, logits, floats, elements)


def _are_within(indices: Ints, end: int) -> bool:
    return int(indices.min()) >= 0 and int(indices.max()) < end


def _in_order(layer: LayerWeights[Matrix]) -> tuple[Matrix, ...]:
    """As PanelStore and forward.py have them."""
    gate_up = layer.gate_up
    bias = interleave(gate_up.bias) if gate_up.bias is not None else None
    return layer.qkv, layer.o, Matrix(interleave(gate_up.weight), bias), layer.down


def _head_norms(layer: LayerWeights[Matrix], head_dim: int) -> Tensor:
    if layer.q_norm is None or layer.k_norm is None:
        return torch.ones(2, head_dim)
    return torch.stack((layer.q_norm, layer.k_norm))
