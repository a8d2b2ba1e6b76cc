"""How one engine runs a model: `EngineConfig`, frozen.

Memory of an engine, in bytes:
    weights       parameters * itemsize(dtype)
    KV pool       num_blocks * block_nbytes,
                  block_nbytes = block_size * layers * 2 * kv_heads * head_dim * itemsize(dtype)
    one step      about token_budget * (8 * hidden + 3 * intermediate) * itemsize(dtype), plus
                  4 * max_num_seqs * vocab (float32 logits), plus one layer's gathered K and V
`kv_memory` bounds the KV pool alone. Where several ranks compute the model together, it is that of
all ranks: each has its heads' part of every block.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.config import DTYPES, ModelConfig, ModelError
from engine.kv_codec import Codec
from engine.prefill_order import PrefillPolicy
from engine.tp.shard import WHOLE, Shard

DeviceName = Literal["cpu", "cuda", "auto"]
DEFAULT_KV_MEMORY = 1 << 30
_CODEC_NAMES = {codec.name.lower(): int(codec) for codec in Codec if codec is not Codec.RAW}
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine runs a model. What depends on the model or the machine is resolved by the
    methods, never written back."""

    model_path: Path
    device: DeviceName = "auto"
    dtype: DtypeName = "auto"
    """auto: what the weights are stored in."""
    kernels: Literal["auto", "torch", "numba", "flashinfer"] = "auto"
    """What computes; auto: where they know the model, on a CPU our own, compiled by Numba, and on a
    card FlashInfer's attention."""
    block_size: int = 16
    """Tokens in one KV block."""
    num_blocks: int | None = None
    """Blocks in the KV pool; None: as many as fit into kv_memory."""
    kv_memory: int | None = None
    """Bytes of the KV pool, where num_blocks does not say; None: see engine/kv_room.py."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; None: the model's own limit."""
    token_budget: int = 512
    """Tokens computed in one step, at most."""
    tpot_slo_ms: float | None = None
    """Prefills take no more of a step with decodes than lets it end in this time, in milliseconds;
    None: as much as token_budget says."""
    prefill_policy: PrefillPolicy = "srf"
    max_queue_ms: float | None = None
    """A prefill leg that would wait longer for those before it, by prediction, is refused; None:
    none is."""
    max_num_seqs: int = 64
    """Sequences computed in one step, at most."""
    cuda_graphs: bool = True
    """On a card, steps of one token a sequence are captured at the start, and replayed."""
    num_threads: int | None = None
    """CPU threads of the model; None: as many as torch would take."""
    swap_memory: int = 0
    """Bytes of host memory for the KV of sequences that gave way, where copying it is cheaper than
    computing it again; taken as it is needed."""
    prefix_caching: bool = True
    pin_share: float = 0.2
    """Part of the pool that pinned prefixes may take; a sequence of max_model_len has room beside
    them in any case."""
    kv_codecs: tuple[str, ...] = ("planes",)
    """By which KV may come, beside raw, where a link is slow: names of engine/kv_codec.py."""
    max_local_tail: int = 256
    """Tokens of a broken transfer that are computed by choice instead of asked for again."""
    """Prompts find the KV of their first blocks where another sequence has computed it."""
    nice: int = 10
    """Scheduling priority of the engine thread; its loops must not starve the network's."""
    probe_s: float = 0.0
    """The engine measures steps of nobody's for at most so long before the first request; 0: it
    learns from requests alone."""
    random_weights: int | None = None
    """Seed; draw weights instead of reading them (tests and benchmarks)."""
    shard: Shard = WHOLE
    """What this rank has of the model. On CUDA rank r is on the r-th of the visible devices."""

    def __post_init__(self) -> None:
        for name in (
            *("block_size", "token_budget", "tpot_slo_ms", "max_queue_ms", "max_num_seqs"),
            "kv_memory",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ModelError(f"{name} is {value}; it must be at least 1")
        if not 0 <= self.pin_share < 1:
            raise ModelError(f"pin_share is {self.pin_share}; it must be at least 0 and below 1")

    def resolve_device(self) -> torch.device:
        if self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ModelError("device is cuda, but torch sees no CUDA device")
        if self.shard.size == 1:
            return torch.device("cuda")
        if self.shard.size > torch.cuda.device_count():
            raise ModelError(
                f"{self.shard.size} ranks need a CUDA device each; torch sees "
                f"{torch.cuda.device_count()}"
            )
        return torch.device("cuda", self.shard.rank)

    def resolve_dtype(self, model: ModelConfig) -> torch.dtype:
        return model.dtype if self.dtype == "auto" else DTYPES[self.dtype]

    def max_pinned(self, num_blocks: int, max_model_len: int) -> int:
        """Blocks that pins may keep."""
        left = num_blocks - -(-max_model_len // self.block_size)
        return max(0, min(int(self.pin_share * num_blocks), left)) if self.prefix_caching else 0

    def resolve_num_blocks(self, model: ModelConfig, default: int = DEFAULT_KV_MEMORY) -> int:
        """`default`: bytes of the pool, where nothing says."""
        if self.num_blocks is not None and self.num_blocks >= 1:
            return self.num_blocks
        block_nbytes = self.block_size * model.kv_token_nbytes(self.resolve_dtype(model))
        kv_memory = default if self.kv_memory is None else self.kv_memory
        num_blocks = kv_memory // block_nbytes if self.num_blocks is None else 0
        if num_blocks < 1:
            raise ModelError(
                f"the KV pool has no room for a block of {block_nbytes} bytes "
                f"(num_blocks {self.num_blocks}, kv_memory {kv_memory})"
            )
        return num_blocks

    def resolve_max_model_len(self, model: ModelConfig) -> int:
        limit = model.max_position_embeddings
        wanted = limit if self.max_model_len is None else self.max_model_len
        if not 1 <= wanted <= limit:
            raise ModelError(f"max_model_len is {wanted}; the model's positions are 1 to {limit}")
        return wanted

    @property
    def codec_ids(self) -> tuple[int, ...]:
        """Raises ModelError for a name that is none."""
        unknown = set(self.kv_codecs) - _CODEC_NAMES.keys()
        if unknown:
            raise ModelError(
                f"{min(unknown)!r} is no KV codec; there are {', '.join(_CODEC_NAMES)}"
            )
        return tuple(_CODEC_NAMES[name] for name in self.kv_codecs)
