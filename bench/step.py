"""`python -m bench.step --model-path FOLDER`: milliseconds of one step of the model, by Numba's
kernels and by torch's, in turns within one process. Prints the ceiling, a table and a JSON line.
`--neighbours N`: beside N processes that wake every 5 ms for 1.2 ms, as an event loop does. With
`--device cuda`, decode steps on a card; see bench/decode_on_card.py.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from bench import decode_on_card
from bench.ceiling import measure
from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig
from engine.decoder import Decoder, Kernels, load_decoder
from engine.engine_config import EngineConfig
from engine.kv_cache import KVCache

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 16, 160
STEPS = ((1, 256, 1), (4, 256, 1), (8, 256, 1), (1, 0, 128), (1, 1536, 512), (1, 0, 2048))
"""(sequences, computed tokens of each, new tokens of each)"""
BOTH: tuple[Kernels, ...] = ("numba", "torch")


_NEIGHBOUR = """
import time
while True:
    began = time.perf_counter()
    while time.perf_counter() - began < 0.0012:
        pass
    time.sleep(0.0038)
"""


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", _NEIGHBOUR]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def batch_of(num_seqs: int, computed: int, new: int) -> BatchInput:
    blocks = np.random.default_rng(1).permutation(NUM_BLOCKS).reshape(num_seqs, -1)
    token_ids = np.full(new, 17, dtype=np.int64)
    rows = [BatchRow(token_ids, computed, table, wants_logits=True) for table in blocks]
    return BatchInput.build(rows, BLOCK_SIZE, CPU)


@torch.inference_mode()
def times_ms(decoder: Decoder, batch: BatchInput, kv: KVCache, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        decoder.forward(batch, kv)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def on_card(parser: argparse.ArgumentParser, model_path: Path, context: int) -> None:
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    figures = []
    for figure in decode_on_card.measure(model_path, torch.device("cuda"), context):
        print(figure.line())
        figures.append(dataclasses.asdict(figure))
    print(json.dumps({"bench": "step", "device": torch.cuda.get_device_name(), "steps": figures}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--neighbours", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--context", type=int, default=1024, help="tokens so far, with cuda")
    args = parser.parse_args()
    if args.device == "cuda":
        on_card(parser, args.model_path, args.context)
        return
    torch.set_num_threads(args.threads)
    print("\n".join(measure(args.model_path).lines(2048)))
    model = ModelConfig.from_folder(args.model_path)
    kv = KVCache(model, NUM_BLOCKS, BLOCK_SIZE, model.dtype, CPU)
    decoders = {}
    for kernels in BOTH:
        config = EngineConfig(args.model_path, kernels=kernels, num_threads=args.threads)
        decoders[kernels] = load_decoder(config, model, model.dtype, CPU)
    figures = []
    for num_seqs, computed, new in STEPS:
        batch = batch_of(num_seqs, computed, new)
        repeats = args.repeats if new < 512 else 2
        with neighbours(args.neighbours):
            times = {name: times_ms(each, batch, kv, repeats) for name, each in decoders.items()}
        best = {name: min(each) for name, each in times.items()}
        median = {name: statistics.median(each) for name, each in times.items()}
        words = ", ".join(f"{name} {best[name]:.1f} ms ({median[name]:.1f})" for name in times)
        print(f"{num_seqs} x {new} tokens behind {computed}, best (median): {words}")
        step = {"seqs": num_seqs, "computed": computed, "new": new}
        figures.append({**step, "best_ms": best, "median_ms": median})
    for each in decoders.values():
        each.close()
    how = {"threads": args.threads, "neighbours": args.neighbours}
    print(json.dumps({"bench": "step", **how, "steps": figures}))


if __name__ == "__main__":
    main()
