"""`python -m tests.kernels`: has the CPU's kernels for float32 on disk, in which tests compare.

A model that is prepared brings those for its own dtype, which is bfloat16.
"""

import json
import tempfile
from pathlib import Path

from engine.config import ModelConfig
from engine.decoder import compile_kernels

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        compile_kernels(ModelConfig.from_folder(Path(folder)))


if __name__ == "__main__":
    main()
