"""What structured outputs cost: compiling a grammar, one mask, and a decode step at batch 8.

    python -m bench.grammar --model-path FOLDER

A step is measured through the engine, with and without a grammar by turns; both say tokens of the
same count. The ceiling of a step is the read of the weights (bench/ceiling.py); that of a mask is
nothing: what it costs beside the forward pass counts only where it makes the step longer.
"""

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from bench.ceiling import measure
from engine.config import ModelConfig
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.request import EngineEvent, EngineRequest, Leg, RequestId, SamplingParams, TokensOut
from runtime.grammar import Grammar, Vocabulary, of_choices, of_ebnf, of_json_schema, of_regex

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["relay", "baton", "runner"]}},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
_GRAMMARS = {
    "json_schema": of_json_schema(_PERSON, {}),
    "json_object": of_json_schema({"type": "object"}, {}),
    "regex": of_regex(r"[A-Z][a-z]{2,20} [0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "choice": of_choices([f"option {index}" for index in range(50)]),
    "ebnf": of_ebnf('root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"'),
}
_ENDLESS = {"type": "array", "items": _PERSON, "minItems": 1000}
_BATCH = 8
_OUTPUTS = 64


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.grammar", description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True, help="folder of the model")
    parser.add_argument("--pairs", type=int, default=7, help="of runs, with and without")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for line in measure(args.model_path).lines(prompt_len=16):
        print(line)
    model = ModelConfig.from_folder(args.model_path)
    began = time.perf_counter()
    vocabulary = Vocabulary.from_folder(args.model_path, model.vocab_size, model.eos_token_ids)
    figures: dict[str, object] = {"vocabulary_ms": (time.perf_counter() - began) * 1e3}
    for name, text in _GRAMMARS.items():
        figures[name] = _grammar_figures(vocabulary, text)
        print(name, figures[name])
    figures["step"] = _step_figures(args.model_path, vocabulary, args.pairs, args.threads)
    print(json.dumps({"bench": "grammar", **figures}))


def _grammar_figures(vocabulary: Vocabulary, text: str) -> dict[str, float]:
    compiling = [_seconds(lambda: vocabulary.compile(text)) for _ in range(9)]
    filling: list[float] = []
    for seed in range(10):
        filling += _walk(vocabulary.compile(text), random.Random(seed))
    micros = np.array(filling) * 1e6
    return {
        "compile_ms": round(statistics.median(compiling) * 1e3, 2),
        "mask_us_p50": round(float(np.percentile(micros, 50)), 1),
        "mask_us_p99": round(float(np.percentile(micros, 99)), 1),
        "mask_us_max": round(float(micros.max()), 1),
        "mask_us_mean": round(float(micros.mean()), 1),
    }


def _walk(grammar: Grammar, chooser: random.Random) -> list[float]:
    """Seconds of each `advance` and `fill` of up to 200 random tokens."""
    words = np.empty(grammar.vocabulary.row_size, dtype=np.int32)
    spent: list[float] = []
    token_ids: list[int] = []
    for _ in range(200):
        began = time.perf_counter()
        grammar.advance(token_ids)
        grammar.fill(words)
        spent.append(time.perf_counter() - began)
        options = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        token_ids = [int(chooser.choice(options))]
        if token_ids[0] in grammar.vocabulary.end_token_ids:
            break
    return spent


def _step_figures(
    folder: Path, vocabulary: Vocabulary, num_pairs: int, num_threads: int
) -> dict[str, float]:
    heard = _Heard()
    config = EngineConfig(folder, device="cpu", num_threads=num_threads, nice=0)
    engine = Engine(config, heard, vocabulary=vocabulary)
    engine.start()
    bound = of_json_schema(_ENDLESS, {"whitespace_flexible": False, "whitespace_pattern": None})
    try:
        for text in ("", bound):
            _tpot_s(engine, heard, text, "warm")
        pairs = [
            (_tpot_s(engine, heard, "", f"{i}"), _tpot_s(engine, heard, bound, f"{i}-bound"))
            for i in range(num_pairs)
        ]
    finally:
        engine.stop()
    free, held = ([pair[side] * 1e3 for pair in pairs] for side in (0, 1))
    return {
        "free_ms": round(statistics.median(free), 2),
        "bound_ms": round(statistics.median(held), 2),
        "extra_ms": round(statistics.median(b - a for a, b in zip(free, held, strict=True)), 2),
        "ratio": round(statistics.median(b / a for a, b in zip(free, held, strict=True)), 3),
    }


class _Heard:
    """When each token of a run came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.is_over = threading.Event()

    def __call__(self, events: list[EngineEvent]) -> None:
        tokens = [event for event in events if isinstance(event, TokensOut)]
        self.times += [time.perf_counter()] * len(tokens)
        if len(self.times) >= _BATCH * _OUTPUTS:
            self.is_over.set()


def _tpot_s(engine: Engine, heard: _Heard, grammar: str, name: str) -> float:
    """Seconds of a step of the batch: the median gap, once all have begun."""
    heard.times.clear()
    heard.is_over.clear()
    for index in range(_BATCH):
        prompt = tuple(random.Random(index).choices(range(1000, 40_000), k=16))
        sampling = SamplingParams(
            max_tokens=_OUTPUTS, ignore_eos=True, grammar=grammar, temperature=1.0, seed=index
        )
        request_id = RequestId(f"{name}-{bool(grammar)}-{index}")
        engine.submit(EngineRequest(request_id, Leg.LOCAL, prompt, sampling))
    assert heard.is_over.wait(120)
    return _median_step(heard.times[4 * _BATCH :])


def _median_step(times: Sequence[float]) -> float:
    steps = sorted(set(times))
    return statistics.median(b - a for a, b in pairwise(steps))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
