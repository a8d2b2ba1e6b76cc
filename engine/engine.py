"""`Engine`: one model on one device, behind the engine loop's command queue.

1. The constructor loads the model and allocates the KV pool, on the caller's thread; seconds. If
   other ranks are to compute it with this one, it waits until they are ready.
2. `start` starts the engine thread; requests go in by `submit`, and come out by `on_events`.
3. KV goes in and out beside the steps: `claim` and `lease` give the right to copy, `copier` copies.
4. `stop` ends it; `failure` tells whether it ended by itself.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from engine.block_pool import BlockPool
from engine.cache_journal import CacheJournal
from engine.config import ModelConfig
from engine.decoder import load_decoder
from engine.engine_config import EngineConfig
from engine.engine_loop import EngineLoop, discard
from engine.errors import InvalidRequest
from engine.fingerprint import facts, fingerprint
from engine.grammars import Grammars
from engine.kv_copier import KVCopier
from engine.kv_room import open_pool
from engine.kv_swapper import KVSwapper, Swapper
from engine.model_runner import ModelRunner
from engine.prefix_cache import PrefixCache
from engine.probe import probe
from engine.request import EngineEvent, FirstToken, RequestId, TokenLogprobs
from engine.scheduler import Scheduler
from engine.tp.ranks import ALONE, ConnectedRanks, NoRanks
from engine.tp.swapping import MirroredSwaps
from runtime.block_hash import block_hash, root_hash
from runtime.grammar import Vocabulary

logger = logging.getLogger(__name__)


class PinOutcome(NamedTuple):
    num_blocks: int
    """Full ones of the prompt."""
    num_cached: int
    num_pinned: int
    """Of those that are cached; fewer where the cap is reached."""


class Engine(EngineLoop):
    """See the module, and EngineLoop for the commands."""

    def __init__(
        self,
        config: EngineConfig,
        on_events: Callable[[list[EngineEvent]], None] = discard,
        wire_version: int = 0,
        vocabulary: Vocabulary | None = None,
        ranks: ConnectedRanks | NoRanks = ALONE,
    ) -> None:
        """Raises ModelError, UnsupportedModel, RankLost. `wire_version` of the fabric that carries
        the KV is part of the fingerprint. Without a `vocabulary` no request may have a grammar.
        `ranks` are the others of `config.shard`; `stop` ends them."""
        self.config = config
        self.kv_codecs = config.codec_ids
        """Ids of the codecs by which KV may come, beside raw."""
        self.model_config = ModelConfig.from_folder(config.model_path)
        device = config.resolve_device()
        dtype = config.resolve_dtype(self.model_config)
        self.kv_shape = self.model_config.kv_shape(dtype)
        """(layers, KV heads, bytes of one head of one token's K or V)"""
        self._ranks = ranks
        self._decoder = load_decoder(config, self.model_config, dtype, device, ranks.collectives)
        self.weights_nbytes = self._decoder.weights_nbytes
        """Of this rank."""
        digest = self._decoder.digest
        self.fingerprint = fingerprint(self.model_config, digest, dtype, wire_version)
        self.kv_facts = facts(self.model_config, digest, dtype, wire_version)
        """What the fingerprint is of, for people."""
        kv_cache = open_pool(config, self.model_config, dtype, device)
        num_blocks = kv_cache.num_blocks
        max_model_len = config.resolve_max_model_len(self.model_config)
        self._decoder.prepare(kv_cache)
        self.kv_token_nbytes = self.model_config.kv_token_nbytes(dtype)
        self.kv_pool_nbytes = (kv_cache.data.nbytes, *ranks.join(digest, num_blocks))
        """Of each rank."""
        _log_start(config, dtype, device, self.kv_pool_nbytes, num_blocks)
        self.copier = KVCopier(kv_cache, config.nice)
        pool = BlockPool(
            num_blocks, config.block_size, config.max_pinned(num_blocks, max_model_len)
        )
        cache = PrefixCache(pool, self.fingerprint) if config.prefix_caching else None
        scheduler = _scheduler(config, pool, cache, max_model_len, self.kv_token_nbytes)
        grammars = Grammars(vocabulary, config.nice)
        runner = ModelRunner(self._decoder, kv_cache, self.copier, grammars, ranks, self._probe)
        super().__init__(
            scheduler,
            runner,
            on_events,
            self.model_config.eos_token_ids,
            nice=config.nice,
            grammars=grammars,
            swapper=self._swapper() if config.swap_memory else None,
        )
        ranks.watch(self._commands.fail)

    @property
    def cache_journal(self) -> CacheJournal:
        """What the prefix cache stores and removes; any thread."""
        return self._scheduler.pool.journal

    def _probe(self) -> None:
        if self.config.probe_s:
            probe(
                self._scheduler.pool,
                self._runner,
                self._scheduler.cost,
                token_budget=self.config.token_budget,
                max_model_len=self.max_model_len,
                seconds=self.config.probe_s,
            )

    def _swapper(self) -> Swapper:
        own = self.config.shard.part_of(self.model_config)
        swapper = KVSwapper(self.copier, own.num_layers, own.num_kv_heads)
        if isinstance(self._ranks, NoRanks):
            return swapper
        return MirroredSwaps(swapper, self._ranks, self.config.block_size)

    def pin(
        self, name: str, token_ids: Sequence[int], cache_salt: str, until_s: float
    ) -> Future[PinOutcome]:
        """Keeps the KV of a prompt's full blocks, as far as it is cached or comes to be, until that
        moment of the clock that `expire_pins` is told. The future raises EngineStopped."""
        size = self.block_size
        hashes = [root_hash(self.fingerprint, cache_salt)]
        for begin in range(0, len(token_ids) // size * size, size):
            hashes.append(block_hash(hashes[-1], token_ids[begin : begin + size]))

        def pin() -> PinOutcome:
            return PinOutcome(len(hashes) - 1, *self._scheduler.pool.pin(name, hashes[1:], until_s))

        return self._commands.ask(pin)

    @property
    def max_pinned(self) -> int:
        """Blocks that all pins together may keep."""
        return self._scheduler.pool.max_pinned

    def unpin(self, name: str) -> Future[bool]:
        """False: there is no pin of that name. The future raises EngineStopped."""
        return self._commands.ask(partial(self._scheduler.pool.unpin, name))

    def expire_pins(self, now_s: float) -> None:
        self._commands.post(partial(self._scheduler.pool.expire_pins, now_s))

    def attach(
        self,
        request_id: RequestId,
        first_token_id: int | None,
        logprobs: TokenLogprobs | None = None,
        others: Mapping[int, FirstToken] = MappingProxyType({}),
    ) -> None:
        """See EngineLoop.attach. Raises InvalidRequest for a token the model does not know: it
        comes from a peer, and would break the device."""
        for token_id in (first_token_id, *(first.token_id for first in others.values())):
            if token_id is not None and not 0 <= token_id < self.model_config.vocab_size:
                raise InvalidRequest(f"first token {token_id} is not in the vocabulary")
        super().attach(request_id, first_token_id, logprobs, others)

    def stop(self) -> None:
        """See EngineLoop.stop; ends the other ranks, completes the copies under way."""
        super().stop()
        self._ranks.close()
        self.copier.close()
        self._decoder.close()
        self._grammars.close()


def _scheduler(
    config: EngineConfig,
    pool: BlockPool,
    cache: PrefixCache | None,
    max_model_len: int,
    kv_token_nbytes: int,
) -> Scheduler:
    return Scheduler(
        pool,
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        cache=cache,
        tpot_slo_s=_seconds(config.tpot_slo_ms),
        prefill_policy=config.prefill_policy,
        max_queue_s=_seconds(config.max_queue_ms),
        swap_nbytes=config.swap_memory,
        token_nbytes=kv_token_nbytes,
    )


def _seconds(ms: float | None) -> float | None:
    return ms / 1000 if ms is not None else None


def _log_start(
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    kv_pool_nbytes: tuple[int, ...],
    num_blocks: int,
) -> None:
    logger.info(
        "%s on %s, ranks: %d; KV pool of %.2f GiB, room for %d tokens",
        str(dtype).removeprefix("torch."),
        device,
        len(kv_pool_nbytes),
        sum(kv_pool_nbytes) / 2**30,
        num_blocks * config.block_size,
    )
