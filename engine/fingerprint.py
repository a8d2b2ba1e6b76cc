"""What a model's KV means, as 32 bytes: two engines may exchange KV if theirs are equal.

Covers the configuration that shapes K and V, the weights (by `ModelWeights.digest`, so neither
their path nor their shards count), the dtype and the wire's version. Block size and device do not
count: the wire is neutral to them.
"""

import hashlib
import json
from dataclasses import asdict

import torch

from engine.config import ModelConfig

_KV_FORMAT = "kv-1"
"""Changes with the payload's layout or with what is cached (keys after rotation, unscaled)."""
_NOT_KV = ("dtype", "eos_token_ids", "max_position_embeddings")


def fingerprint(
    config: ModelConfig, weights_digest: bytes, dtype: torch.dtype, wire_version: int
) -> bytes:
    """32 bytes; the same in every process and on every machine."""
    facts = {
        "format": _KV_FORMAT,
        "wire_version": wire_version,
        "dtype": str(dtype),
        "weights": weights_digest.hex(),
        "config": {name: value for name, value in asdict(config).items() if name not in _NOT_KV},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def facts(config: ModelConfig, weights_digest: bytes, dtype: torch.dtype, wire_version: int) -> str:
    """`name=value;…`: of what the fingerprint covers, what tells people two engines apart."""
    told = {
        "dtype": str(dtype).removeprefix("torch."),
        "model": config.architecture,
        "layers": config.num_layers,
        "KV heads": config.num_kv_heads,
        "head size": config.head_dim,
        "weights": weights_digest.hex()[:12],
        "wire version": wire_version,
    }
    return ";".join(f"{name}={value}" for name, value in told.items())
