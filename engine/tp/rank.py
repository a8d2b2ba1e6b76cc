"""One rank beside rank 0: its part of the model and of the KV, and no decisions.

1. The constructor loads its part and allocates its KV pool; `kv_heads` says which heads are in it.
   The pool has as many blocks as rank 0's, and the same block ids mean the same tokens: rank 0's
   pool decides for all.
2. `serve` joins the other ranks and does what rank 0 announces, on the caller's thread, until rank
   0 closes the channel, or is gone. KV goes in and out beside it, by `copier`, for whoever has rank
   0's word that the blocks are his meanwhile.
3. `close`. What fails on the way is told to rank 0 by `telling`, which goes around all of it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.batch import BatchInput
from engine.config import ModelConfig
from engine.decoder import load_decoder
from engine.engine_config import EngineConfig
from engine.kv_copier import KVCopier
from engine.kv_room import open_pool
from engine.model import ModelOutput
from engine.thread_priority import lower_priority
from engine.tp.channel import Kind, Message, StepChannel
from engine.tp.collectives import TorchCollectives
from engine.tp.messages import Loaded, SwapOrder, Swapped, read_batch, read_ids, read_rows
from engine.tp.swapping import RankSwaps

logger = logging.getLogger(__name__)


class Rank:
    """See the module. `config.shard` says which one it is."""

    def __init__(self, config: EngineConfig, channel: StepChannel, rendezvous: Path) -> None:
        """Raises ModelError, UnsupportedModel. For `rendezvous` see TorchCollectives."""
        self.config = config
        self.shard = config.shard
        self.model_config = ModelConfig.from_folder(config.model_path)
        self.kv_heads = self.shard.kv_heads(self.model_config)
        """Of the model's KV heads, those whose KV is here."""
        self._device = config.resolve_device()
        dtype = config.resolve_dtype(self.model_config)
        self.kv_shape = self.model_config.kv_shape(dtype)
        """As the engine's: (layers, KV heads of the whole model, bytes of one head)."""
        self._channel = channel
        self._collectives = TorchCollectives(self.shard, self._device, rendezvous)
        self._decoder = load_decoder(
            config, self.model_config, dtype, self._device, self._collectives
        )
        self._kv_cache = open_pool(config, self.model_config, dtype, self._device)
        self._decoder.prepare(self._kv_cache)
        self.digest = self._decoder.digest
        self.copier = KVCopier(self._kv_cache, config.nice)
        layers, _, _ = self.kv_shape
        self._swaps = RankSwaps(self.copier, layers, len(self.kv_heads), self._tell_swapped)
        self._batch: BatchInput | None = None
        self._output: ModelOutput | None = None

    def serve(self) -> None:
        """Returns when rank 0 has closed the channel, or is gone."""
        kv = self._kv_cache
        loaded = Loaded(self.digest, kv.num_blocks, kv.data.nbytes)
        self._channel.send(Kind.LOADED, loaded.pack())
        self._collectives.join()
        lower_priority(self.config.nice)
        with torch.inference_mode():
            while (message := self._channel.receive()) is not None:
                if message.kind is Kind.CLOSE:
                    return
                self._do(message)
        logger.warning("rank 0 is gone")

    def close(self) -> None:
        """Completes the copies under way."""
        self._collectives.close()
        self.copier.close()
        self._decoder.close()

    def _tell_swapped(self, swapped: Swapped) -> None:
        try:
            self._channel.send(Kind.SWAPPED, swapped.pack())
        except OSError:
            logger.debug("rank 0 is gone, and does not need to know")

    def _do(self, message: Message) -> None:
        match message.kind:
            case Kind.FORWARD:
                packed = read_batch(message.payload, pinned=self._device.type == "cuda")
                self._batch = packed.to(self._device)
                self._output = self._decoder.forward(self._batch, self._kv_cache)
                self.copier.record_compute()
            case Kind.PROMPT_LOGITS:
                assert self._batch is not None, "of the last forward"
                assert self._output is not None
                rows = self._batch.prompt_indices[read_rows(message.payload)]
                self._decoder.logits(self._output.hidden[rows])
            case Kind.COPY_BLOCKS:
                ids = read_ids(message.payload)
                self._kv_cache.copy_blocks(list(zip(ids[::2], ids[1::2], strict=True)))
                self.copier.record_compute()
            case Kind.SWAP_OUT:
                self._swaps.swap_out(SwapOrder.read(message.payload))
            case Kind.SWAP_IN:
                self._swaps.swap_in(SwapOrder.read(message.payload))
            case Kind.SWAP_DROP:
                self._swaps.drop(*read_ids(message.payload))
            case _:
                raise AssertionError(f"rank 0 does not say {message.kind!r}")


@contextmanager
def telling(channel: StepChannel) -> Iterator[None]:
    """Rank 0 hears what failed in the block, before this process ends of it."""
    try:
        yield
    except Exception as error:
        try:
            channel.send(Kind.FAILED, (str(error) or repr(error)).encode())
        except OSError:
            logger.warning("rank 0 is gone, and never hears: %s", error)
        raise
