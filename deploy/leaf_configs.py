"""What a worker's flags mean to its engine and its fabric, on each of its ranks."""

import os
from pathlib import Path

from deploy.worker_config import DECODE_TPOT_SLO_MS, MIXED_TPOT_SLO_MS, WorkerConfig
from engine.engine_config import EngineConfig
from engine.tp.shard import Shard
from kvfabric.config import FabricConfig


def engine_config(config: WorkerConfig, shard: Shard) -> EngineConfig:
    """Of a worker's rank; `config.cores` are that rank's own."""
    return EngineConfig(
        model_path=Path(config.model_path),
        device=config.device,
        dtype=config.dtype,
        kernels=config.kernels,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        kv_memory=config.kv_memory,
        swap_memory=config.swap_memory,
        max_model_len=config.max_model_len,
        token_budget=config.token_budget,
        tpot_slo_ms=_tpot_slo_ms(config),
        prefill_policy=config.prefill_policy,
        max_queue_ms=config.max_queue_ms or None,
        max_num_seqs=config.max_num_seqs,
        cuda_graphs=config.cuda_graphs,
        prefix_caching=config.prefix_caching,
        max_local_tail=config.max_local_tail,
        kv_codecs=config.kv_codecs,
        num_threads=len(config.cores) or _share_of_all_cores(shard),
        pin_share=config.pin_share,
        probe_s=config.probe_s,
        random_weights=config.random_weights,
        shard=shard,
    )


def _tpot_slo_ms(config: WorkerConfig) -> float | None:
    """None: there is none."""
    if config.tpot_slo_ms is None:
        return DECODE_TPOT_SLO_MS if config.role == "decode" else MIXED_TPOT_SLO_MS
    return config.tpot_slo_ms or None


def _share_of_all_cores(shard: Shard) -> int | None:
    """None: torch takes all."""
    return None if shard.size == 1 else max(1, len(os.sched_getaffinity(0)) // shard.size)


def fabric_config(
    config: WorkerConfig, fingerprint: bytes, facts: str, generation: int, rank: int = 0
) -> FabricConfig:
    """Of a worker's rank: each listens, on ports that follow upon each other."""
    return FabricConfig(
        listen=_port_of_rank(config.fabric_listen, rank),
        advertise_host=config.advertise_host,
        fingerprint=fingerprint,
        facts=facts,
        generation=generation,
        slot_nbytes=config.slot_size,
        send_slots=config.send_slots,
        recv_slots=config.recv_slots,
        checksum=config.checksum,
        connect_timeout_s=config.connect_timeout_s,
        send_timeout_s=config.send_timeout_s,
        offer_timeout_s=config.offer_timeout_s,
        first_frame_timeout_s=config.first_frame_timeout_s,
        transfer_timeout_s=config.transfer_timeout_s,
        faults=config.inject_faults,
    )


def _port_of_rank(address: str, rank: int) -> str:
    """Port 0 is any free one, for every rank."""
    host, _, port = address.rpartition(":")
    if not rank or not port.isdecimal() or not int(port):
        return address
    return f"{host}:{int(port) + rank}"
