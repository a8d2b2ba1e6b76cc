"""The one configuration of a worker process."""

from dataclasses import dataclass
from typing import Literal

from runtime.flags import flag, nbytes

MIXED_TPOT_SLO_MS, DECODE_TPOT_SLO_MS = 90.0, 30.0
"""Where most prompts are computed beside streams, and where few are."""


@dataclass(frozen=True)
class WorkerConfig:
    """Flags of `python -m deploy.worker`, each also an environment variable BATON_<NAME>."""

    role: Literal["prefill", "decode", "both"] = flag(
        help="what it serves at first; `baton flip` changes it"
    )
    model_path: str = flag(help="folder of the prepared model (see python -m engine.prepare)")
    name: str = flag("worker", help="name in logs and in Status")

    # Where it is reached.
    host: str = flag("127.0.0.1", help="address to listen on, for gRPC and metrics")
    grpc_port: int = flag(0, help="control plane; 0 takes a free one")
    metrics_port: int = flag(0, help="Prometheus; 0 takes a free one")
    fabric_listen: str = flag(
        "ucx://0.0.0.0:0",
        help="where KV frames come in; port 0 takes a free one; rank r listens r ports further on",
    )
    advertise_host: str = flag("127.0.0.1", help="host under which peers reach the fabric")
    tls_cert: str = flag("", metavar="FILE", help="PEM; with the two below: mutual TLS on gRPC")
    tls_key: str = flag("", metavar="FILE", help="PEM, its key, without a password")
    tls_ca: str = flag("", metavar="FILE", help="PEM, the authority that signs every process")

    # The engine.
    device: Literal["auto", "cpu", "cuda"] = flag("auto", help="where the model runs")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = flag(
        "auto", help="of weights and KV; auto is what the model is stored in"
    )
    kernels: Literal["auto", "torch", "numba", "flashinfer"] = flag(
        "auto",
        help="what computes; auto: Numba's kernels on a CPU and FlashInfer's attention on a card, "
        "if they know the model, else torch's",
    )
    tensor_parallel: int = flag(
        1,
        help="processes (ranks) that compute the model together, each with its part of the weights "
        "and of the KV; the two sides of a handoff may differ in it",
    )
    cores: tuple[str, ...] = flag(
        (), help="CPU cores to stay on; none: all; several ranks divide them"
    )
    block_size: int = flag(16, help="tokens in one KV block")
    num_blocks: int | None = flag(None, help="blocks in the KV pool (default: by --kv-memory)")
    kv_memory: int | None = flag(
        None,
        parse=nbytes,
        metavar="SIZE",
        help="size of the KV pool, of all ranks (default: what a card has left beside the weights "
        "and the largest step, or 1GiB on a CPU and with several ranks)",
    )
    swap_memory: int = flag(
        512 << 20,
        parse=nbytes,
        metavar="SIZE",
        help="host memory for the KV of streams that give way to older ones for want of blocks, "
        "where copying it is cheaper than computing it again; taken as needed",
    )
    max_model_len: int | None = flag(
        None, help="longest prompt and output together (default: the model's)"
    )
    token_budget: int = flag(512, help="tokens computed in one step, at most")
    tpot_slo_ms: float | None = flag(
        None,
        help="prompts are computed in such chunks that streams wait no longer than this between "
        "two tokens, as far as measured steps tell; 0: in chunks of --token-budget (default: "
        f"{DECODE_TPOT_SLO_MS:g} for decode, {MIXED_TPOT_SLO_MS:g} for the other roles)",
    )
    prefill_policy: Literal["fcfs", "srf"] = flag(
        "srf",
        help="order of prompts: first come first served, or shortest remaining first with ageing",
    )
    max_queue_ms: float = flag(
        20_000.0,
        help="a prefill worker refuses prompts that would wait longer for those before them, by "
        "prediction; they wait in the router then; 0: it refuses none",
    )
    kv_codecs: tuple[str, ...] = flag(
        ("planes",),
        help="how KV may be encoded on its way to a decode worker, where the measured link is so "
        "slow that it gains time: planes (lossless), int8 (changes answers); empty: never",
    )
    max_local_tail: int = flag(
        256,
        help="a decode worker computes what a broken transfer left out itself, if that is quicker "
        "than another prefill leg and no more than so many tokens; 0: never by its own choice",
    )
    max_num_seqs: int = flag(64, help="sequences computed in one step, at most")
    cuda_graphs: bool = flag(
        True, help="on a card, replay decode steps that were captured at start"
    )
    prefix_caching: bool = flag(True, help="reuse the KV of first blocks that prompts share")
    probe_s: float = flag(
        1.0,
        help="longest time to measure steps before the first request, so that predictions begin "
        "with this machine; 0: requests alone teach",
    )
    pin_share: float = flag(
        0.2,
        help="part of the KV pool that pinned prefixes may take (baton pin); the longest sequence "
        "has room beside them in any case; 0: nothing can be pinned",
    )
    random_weights: int | None = flag(None, help="seed; draw weights instead of reading them")

    # The fabric.
    slot_size: int = flag(
        4 << 20, parse=nbytes, metavar="SIZE", help="staging slot: the largest frame"
    )
    send_slots: int = flag(8, help="staging slots for frames going out")
    recv_slots: int = flag(8, help="staging slots for frames coming in")
    checksum: bool = flag(True, help="checksum every frame")
    connect_timeout_s: float = flag(5.0, help="to reach a peer's fabric, handshake included")
    send_timeout_s: float = flag(10.0, help="for one frame to leave")
    offer_timeout_s: float = flag(
        5.0, help="a peer that has announced frames and sends none for this long loses its slots"
    )
    first_frame_timeout_s: float = flag(
        90.0,
        help="for a transfer to begin after its ticket is minted: several times the --max-queue-ms "
        "of the prefill workers, for that is a prediction",
    )
    transfer_timeout_s: float = flag(
        30.0, help="longest silence of a transfer that has begun, before another ticket is minted"
    )
    fabric_floor: int = flag(
        200 << 20,
        parse=nbytes,
        metavar="SIZE",
        help="bytes a second below which the fabric's self-test, made once at the start, warns; "
        "0: there is none",
    )
    install_share: float = flag(
        0.05,
        help="share of a core's time that receiving and installing KV may take while a decode "
        "worker serves streams on all of its cores; 1: it takes what it needs",
    )
    inject_faults: str = flag(
        "",
        metavar="RULES",
        help="for tests: harm messages of the fabric, such as kv:drop:0.01,commit:delay:0.5,seed=7 "
        "(rules: kvfabric/faults.py)",
    )

    # The process.
    drain_grace_s: float = flag(30.0, help="time that running requests get on SIGTERM")
    log_format: Literal["text", "json"] = flag("text", help="one line per event")
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", help="least level")
