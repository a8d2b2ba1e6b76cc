"""What is told of layers in mid-step is true of both models, and changes no bit."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig
from engine.decoder import Decoder
from engine.kv_cache import KVCache
from engine.layer_groups import LayerGroups, group_ends
from engine.model import Model
from engine.weights import load_weights, read_weights
from tests.engine.conftest import TinyModel
from tests.engine.model_driver import random_prompt

CPU = torch.device("cpu")


@given(st.integers(1, 200))
def test_groups_halve_what_is_left_and_the_last_is_small(num_layers: int) -> None:
    ends = group_ends(num_layers, 512)
    assert list(ends) == sorted(set(ends))
    assert 0 < ends[0] <= ends[-1] == num_layers
    assert ends[-1] - (ends[-2] if len(ends) > 1 else 0) <= max(1, num_layers // 80)
    assert len(ends) <= 9


def test_groups_of_a_model_of_thirty_layers() -> None:
    assert group_ends(30, 64) == (15, 23, 27, 30)
    assert group_ends(30, 512) == (15, 23, 27, 29, 30), "the more tokens, the less is left"
    assert group_ends(30, 63) == (30,)
    assert group_ends(1, 512) == (1,)


@pytest.fixture(params=["torch", "numba"])
def model(request: pytest.FixtureRequest, wide_llama: TinyModel) -> Iterator[Decoder]:
    config = ModelConfig.from_folder(wide_llama.folder)
    if request.param == "torch":
        yield Model(config, load_weights(wide_llama.folder, config, torch.float32, CPU))
        return
    if importlib.util.find_spec("numba") is None:
        pytest.skip("Numba is not installed")
    from engine.cpu.model import PanelModel
    from engine.cpu.team import Team

    team = Team(2)
    panels = read_weights(
        wide_llama.folder, config, torch.float32, CPU, lambda reader: PanelModel.read(reader, team)
    )
    yield panels
    panels.close()


def test_layers_are_told_of_when_their_kv_is_there(model: Decoder, wide_llama: TinyModel) -> None:
    config = ModelConfig.from_folder(wide_llama.folder)
    prompt = torch.tensor(random_prompt(40, seed=1)).numpy()
    row = BatchRow(prompt, 0, torch.randperm(10).numpy(), wants_logits=True)
    batch = BatchInput.build([row], 4, CPU)
    plain, grouped = (KVCache(config, 10, 4, torch.float32, CPU) for _ in range(2))
    logits = model.forward(batch, plain).logits.clone()
    seen: dict[int, Tensor] = {}

    def tell(num_layers: int) -> None:
        seen[num_layers] = grouped.data.clone()

    ends = group_ends(config.num_layers, 64)
    told = model.forward(batch, grouped, LayerGroups(ends, tell)).logits
    assert torch.equal(told, logits)
    assert torch.equal(grouped.data, plain.data)
    assert tuple(seen) == ends == (1, 2)
    for num_layers, data in seen.items():
        assert torch.equal(data[:num_layers], plain.data[:num_layers])
        assert not data[num_layers:].any(), "told in the midst of the step"
