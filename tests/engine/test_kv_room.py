"""What the KV pool gets by default, and what it is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig, ModelError
from engine.engine import Engine
from engine.engine_config import DEFAULT_KV_MEMORY, EngineConfig
from engine.kv_room import default_nbytes, free_nbytes, open_pool, step_nbytes
from engine.tp.shard import Shard
from tests.engine.conftest import TinyModel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30


@pytest.fixture
def model(tiny_llama: TinyModel) -> ModelConfig:
    return ModelConfig.from_folder(tiny_llama.folder)


@pytest.fixture
def config(tiny_llama: TinyModel) -> EngineConfig:
    return EngineConfig(tiny_llama.folder, device="cpu", dtype="float32", block_size=16)


def test_a_card_gives_what_a_step_leaves(config: EngineConfig, model: ModelConfig) -> None:
    room = default_nbytes(config, model, CUDA, 100 * GIB)
    assert room == 90 * GIB - step_nbytes(config, model)
    more = replace(config, token_budget=8192, max_num_seqs=256)
    assert step_nbytes(more, model) > 4 * 256 * model.vocab_size + 8192 * 8 * model.hidden_size
    assert default_nbytes(more, model, CUDA, 100 * GIB) < room
    assert default_nbytes(config, model, CUDA, 0) == 0
    with pytest.raises(ModelError, match="no room for a block"):
        config.resolve_num_blocks(model, default=0)


def test_a_cpu_and_ranks_get_a_fixed_size(config: EngineConfig, model: ModelConfig) -> None:
    assert default_nbytes(config, model, CPU, 100 * GIB) == DEFAULT_KV_MEMORY
    ranks = replace(config, shard=Shard(1, 2))
    assert default_nbytes(ranks, model, CUDA, 100 * GIB) == DEFAULT_KV_MEMORY


def test_the_pool_is_what_was_asked_for(config: EngineConfig, model: ModelConfig) -> None:
    wanted = 10 * 16 * model.kv_token_nbytes(torch.float32)
    for asked in (replace(config, kv_memory=wanted), replace(config, num_blocks=10)):
        kv = open_pool(asked, model, torch.float32, CPU)
        assert kv.num_blocks == 10
        assert kv.data.nbytes == wanted


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"kv_memory": 1 << 50},
            r"1048576\.00 GiB \(--kv-memory\), but cpu has \d+\.\d\d GiB free",
        ),
        ({"num_blocks": 1 << 40}, r"GiB \(--num-blocks\), but cpu has"),
    ],
)
def test_more_than_there_is_is_one_clear_error(
    config: EngineConfig, fields: dict[str, int], text: str
) -> None:
    """Before a byte is written; whoever starts the worker reads this line and status 2."""
    with pytest.raises(ModelError, match=text) as caught:
        Engine(replace(config, **fields))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_card_that_has_less_than_it_said_is_the_same_error(
    config: EngineConfig, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nand so on")

    monkeypatch.setattr("engine.kv_room.KVCache", no_memory)
    with pytest.raises(ModelError, match=r"the KV pool would take 1\.00 GiB \(--kv-memory\)"):
        open_pool(config, model, torch.float32, CPU)


def host(root: Path, **cgroup: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  4096 kB\nHugePages: 0\n")
    if cgroup:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        for name, text in cgroup.items():
            (root / "sys/fs/cgroup" / name.replace("_", ".")).write_text(text)
    return root


def test_a_host_without_limits(tmp_path: Path) -> None:
    assert free_nbytes(CPU, host(tmp_path)) == 4096 << 10


@pytest.mark.parametrize(
    ("limit", "free"), [("max\n", 4096 << 10), ("3000000\n", 2_500_000), ("90000000\n", 4096 << 10)]
)
def test_a_container_has_its_limit(tmp_path: Path, limit: str, free: int) -> None:
    """Of what it uses, files that can be read again do not count."""
    stat = "anon 600000\ninactive_file 100000\n"
    root = host(tmp_path, memory_max=limit, memory_current="600000\n", memory_stat=stat)
    assert free_nbytes(CPU, root) == free
