"""Tiny random models of every supported family, written once a session as Hugging Face folders by
transformers itself: the foreign yardstick of the decoder."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SHAPE = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
_WIDE = {**_SHAPE, "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 2}
"""With heads of whole vectors, for the CPU's kernels; an odd number of panels, partial ones."""
_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama3": lambda: LlamaConfig(
        **_SHAPE, rope_parameters=_LLAMA3_ROPE, attention_bias=True, mlp_bias=True
    ),
    "llama-linear": lambda: LlamaConfig(
        **_SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    ),
    "qwen2": lambda: Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=16, attention_bias=True),
    "mistral": lambda: MistralConfig(**_SHAPE, head_dim=12, sliding_window=20),
}
_WIDE_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "wide-llama": lambda: LlamaConfig(**_WIDE, head_dim=64, tie_word_embeddings=True),
    "wide-llama3": lambda: LlamaConfig(
        **{**_WIDE, "hidden_size": 240, "num_attention_heads": 15, "num_key_value_heads": 1},
        head_dim=32,
        rope_parameters=_LLAMA3_ROPE,
        attention_bias=True,
        mlp_bias=True,
    ),
    "wide-qwen2": lambda: Qwen2Config(
        **{**_WIDE, "hidden_size": 192},
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
    ),
    "wide-qwen3": lambda: Qwen3Config(**_WIDE, head_dim=32, attention_bias=True),
    "wide-mistral": lambda: MistralConfig(
        **{**_WIDE, "num_key_value_heads": 6}, head_dim=32, sliding_window=20
    ),
}

_UNEVEN_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "uneven-llama": lambda: LlamaConfig(
        **{**_SHAPE, "num_key_value_heads": 3, "intermediate_size": 81}
    ),
}
"""Of which two ranks cannot have half each."""


@dataclass(frozen=True)
class TinyModel:
    family: str
    folder: Path
    reference: PreTrainedModel
    """transformers' own, float32, eager attention."""


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """By family name; each is made when first asked for."""
    made: dict[str, TinyModel] = {}

    def make(family: str) -> TinyModel:
        if family not in made:
            made[family] = _write(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture(scope="session", params=_FAMILIES)
def tiny_model(
    request: pytest.FixtureRequest, tiny_models: Callable[[str], TinyModel]
) -> TinyModel:
    """Every family in turn."""
    return tiny_models(request.param)


@pytest.fixture(scope="session", params=_WIDE_FAMILIES)
def wide_model(
    request: pytest.FixtureRequest, tiny_models: Callable[[str], TinyModel]
) -> TinyModel:
    """Every family in turn, in a shape that the CPU's kernels take."""
    return tiny_models(request.param)


@pytest.fixture(scope="session")
def wide_llama(tiny_models: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_models("wide-llama")


@pytest.fixture(scope="session")
def tiny_llama(tiny_models: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_models("llama")


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _write(family: str, folder: Path) -> TinyModel:
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = AutoModelForCausalLM.from_config(
            (_FAMILIES | _WIDE_FAMILIES | _UNEVEN_FAMILIES)[family](), attn_implementation="eager"
        )
        _randomise_vectors(model)
    model.eval().save_pretrained(folder)
    return TinyModel(family, folder, model)


def _randomise_vectors(model: PreTrainedModel) -> None:
    """transformers starts biases at 0 and norms at 1, which would hide a mistake in either."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
