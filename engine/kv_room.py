"""How much memory the KV pool may take, and the pool in it.

* On a card, by default: nine tenths of what is free beside the weights, less what a step needs.
  Ranks that compute one model together would each measure something else, and their pools must have
  as many blocks; they take the fixed size that a CPU gets.
* A pool that is larger than what is free is refused before anything is written: the system would
  end the process later, without a word.

Called once, when weights are loaded and nothing is computed yet.
"""

from pathlib import Path

import torch

from engine.config import ModelConfig, ModelError
from engine.cuda.padded_attention import MAX_GATHERED_NBYTES
from engine.engine_config import DEFAULT_KV_MEMORY, EngineConfig
from engine.kv_cache import KVCache

_SHARE = 0.9


def open_pool(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """`config.shard`'s part of `model`. On a card it has a scratch block. Raises ModelError, with
    the numbers."""
    free = free_nbytes(device)
    num_blocks = config.resolve_num_blocks(model, default_nbytes(config, model, device, free))
    own = config.shard.part_of(model)
    wanted = num_blocks * config.block_size * own.kv_token_nbytes(dtype)
    asked = "--kv-memory" if config.num_blocks is None else "--num-blocks"
    too_large = ModelError(
        f"the KV pool would take {_gib(wanted)} ({asked}), but {device.type} has {_gib(free)} free"
    )
    if wanted > free:
        raise too_large
    try:
        return KVCache(own, num_blocks, config.block_size, dtype, device, device.type == "cuda")
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise too_large from error


def default_nbytes(
    config: EngineConfig, model: ModelConfig, device: torch.device, free: int
) -> int:
    """Of the pool, where nobody says."""
    if device.type != "cuda" or config.shard.size > 1:
        return DEFAULT_KV_MEMORY
    return max(0, int(_SHARE * free) - step_nbytes(config, model))


def step_nbytes(config: EngineConfig, model: ModelConfig) -> int:
    """Of the largest step, and of the largest captured one; see EngineConfig. The sampler has up to
    six times the logits, when it sorts them; what torch's attention gathers is bounded as in
    captured steps."""
    max_len = config.resolve_max_model_len(model)
    layer_nbytes = model.kv_token_nbytes(config.resolve_dtype(model)) // model.num_layers
    gathered = min(MAX_GATHERED_NBYTES, config.max_num_seqs * max_len * layer_nbytes)
    itemsize = config.resolve_dtype(model).itemsize
    token = (8 * model.hidden_size + 3 * model.intermediate_size) * itemsize
    logits = 4 * config.max_num_seqs * model.vocab_size
    return (config.token_budget + config.max_num_seqs) * token + 6 * logits + gathered


def free_nbytes(device: torch.device, root: Path = Path("/")) -> int:
    """On the device, after what torch keeps for later is given back. `root`: of the host's files.

    A container's limit counts, where cgroup v2 tells it; pages of files that it has read do not."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    meminfo = _fields(root / "proc/meminfo")
    free = meminfo["MemAvailable:"] << 10
    cgroup = root / "sys/fs/cgroup"
    try:
        limit, used = ((cgroup / name).read_text() for name in ("memory.max", "memory.current"))
        reclaimable = _fields(cgroup / "memory.stat").get("inactive_file", 0)
    except OSError:  # the root group has no limit, and other systems no cgroups
        return free
    return free if limit.strip() == "max" else min(free, int(limit) - int(used) + reclaimable)


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name, a number and perhaps a unit."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
