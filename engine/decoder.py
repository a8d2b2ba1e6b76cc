"""The model as a runner sees it, and which of its two implementations a machine gets.

* engine/model.py runs on any device, by torch; attention on a card is FlashInfer's or torch's.
* engine/cpu/ runs on CPU cores, by kernels of our own that Numba compiles. It computes a whole
  model: ranks that compute one together do so by torch.
"""

import dataclasses
import importlib.util
import logging
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from engine.attention import AttentionFactory, GatherAttention
from engine.batch import BatchInput
from engine.config import ModelConfig, ModelError
from engine.cuda.capture import cuda_capture
from engine.cuda.flashinfer_library import unsupported as unsupported_by_flashinfer
from engine.cuda.load import open_flashinfer, with_graphs
from engine.engine_config import EngineConfig
from engine.kv_cache import KVCache
from engine.layer_groups import LayerGroups
from engine.model import Model, ModelOutput
from engine.sampler import Sampler
from engine.tp.collectives import Collectives
from engine.tp.shard import WHOLE, Shard
from engine.weights import ModelWeights, WeightReader, random_reader, read_weights

logger = logging.getLogger(__name__)

Kernels = Literal["torch", "numba", "flashinfer"]
_Weights = TypeVar("_Weights")


class Decoder(Protocol):
    """One model. Engine thread only."""

    digest: bytes
    """Of the weights; see WeightReader."""
    num_torch_threads: int | None
    """Threads that torch should use around it; None leaves torch's own choice."""
    sampler: Sampler
    weights_nbytes: int
    """Memory of the weights, in the layout that it computes with."""

    def prepare(self, kv: KVCache) -> None:
        """Once, before the first `forward` over this cache; what is in it does not change."""

    def forward(
        self, batch: BatchInput, kv: KVCache, groups: LayerGroups | None = None
    ) -> ModelOutput:
        """Writes K and V of the batch's tokens into `kv`. `groups` of layers are told of as they
        are done, but by a replayed step."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden], rows of what the last `forward` gave → [n, vocab] float32."""
        ...

    def close(self) -> None:
        """Ends its threads."""


def load_decoder(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    collectives: Collectives | None = None,
) -> Decoder:
    """`config.shard` of the model; with others there must be `collectives`. Raises ModelError, for
    what cannot be read and for kernels that cannot run it."""
    if config.num_threads is not None:
        # Loading is torch's; threads beyond the cores would spin and wait for each other.
        torch.set_num_threads(config.num_threads)
    kernels, reason = choose_kernels(config, model, dtype, device)
    attention, failure = _attention(config, kernels, model, dtype, device)
    if failure:
        kernels, reason = "torch", failure
    num_threads = config.num_threads or torch.get_num_threads()
    why = f" ({reason})" if reason else ""
    logger.info("the model runs by %s%s, threads: %d", kernels, why, num_threads)
    if kernels == "numba":
        from engine.cpu.model import PanelModel  # compiles, and needs Numba
        from engine.cpu.team import Team

        team = Team(num_threads, config.nice)
        return _read(config, model, dtype, device, lambda reader: PanelModel.read(reader, team))
    weights = _read(config, model, dtype, device, ModelWeights.read)
    loaded = Model(
        model,
        weights,
        attention,
        num_threads=config.num_threads,
        shard=config.shard,
        collectives=collectives,
    )
    if device.type == "cuda" and config.cuda_graphs and config.shard.size == 1:
        return with_graphs(loaded, attention, config, cuda_capture(device))
    return loaded


def compile_kernels(model: ModelConfig) -> None:
    """Has the machine's CPU kernels for this model's dtype on disk, so that workers start without
    compiling each for itself: seconds, the first time. Nothing where they will not run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if _why_not_numba(model, model.dtype, device):
        return
    from engine.cpu.model import PanelModel  # needs Numba
    from engine.cpu.team import Team

    tiny = dataclasses.replace(
        model,
        num_layers=1,
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        windows=(None,),
    )
    PanelModel.read(random_reader(tiny, 0, model.dtype, device), Team(1))


def _read(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    build: Callable[[WeightReader], _Weights],
) -> _Weights:
    if config.random_weights is not None:
        return build(random_reader(model, config.random_weights, dtype, device, config.shard))
    return read_weights(config.model_path, model, dtype, device, build, config.shard)


def choose_kernels(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Kernels, str]:
    """And why not the fastest, if they were not to be had. Raises ModelError if they were asked
    for."""
    if config.kernels == "torch":
        return "torch", ""
    best: Kernels = "numba" if device.type == "cpu" else "flashinfer"
    wanted: Kernels = best if config.kernels == "auto" else config.kernels
    if wanted == "numba":
        reason = _why_not_numba(model, dtype, device, config.shard)
    else:
        reason = _why_not_flashinfer(model, dtype, device)
    if not reason:
        return wanted, ""
    if config.kernels != "auto":
        raise ModelError(f"kernels are to be {_OWNERS[wanted]}'s, but {reason}")
    return "torch", reason


_OWNERS = {"numba": "Numba", "flashinfer": "FlashInfer"}


def _why_not_flashinfer(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Before it is tried; see engine/cuda/load.py."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    return unsupported_by_flashinfer(model, dtype)


def _attention(
    config: EngineConfig,
    kernels: Kernels,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[AttentionFactory, str]:
    """And why not FlashInfer's, if it fails when it is tried. Raises ModelError if it was asked
    for."""
    if kernels != "flashinfer":
        return GatherAttention, ""
    try:
        part = config.shard.part_of(model)
        return open_flashinfer(part, dtype, device, config.block_size), ""
    except ModelError as error:
        if config.kernels == "flashinfer":
            raise
        return GatherAttention, str(error)


def _why_not_numba(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard = WHOLE
) -> str:
    if shard.size > 1:
        return f"{shard.size} ranks compute the model together"
    if device.type != "cpu":
        return f"the device is {device.type}"
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed"
    from engine.cpu.model import unsupported  # needs Numba

    return unsupported(model, dtype)
