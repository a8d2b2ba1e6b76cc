"""What choosing tokens costs beside the model: `python -m bench.sampler`.

Milliseconds a step, on one thread of the CPU, with 49,152 logits a row, by numpy and torch and by
kernels; the median of 30. The logits are as peaked as those of a language model: some hundred
within 5 of the largest, some thousands within 10. The ceiling is one pass over the logits (their
largest). The last line is JSON.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.cpu.sampler import KernelSampler
from engine.cpu.team import Team
from engine.logit_rules import LogitRules, pack_words
from engine.logprobs import StepLogprobs
from engine.request import SamplingParams
from engine.sampler import Sampler, SampleRow, TorchSampler

VOCAB = 49152
BATCHES = (1, 8, 32)
SAMPLERS: dict[str, Sampler] = {"numpy": TorchSampler(), "kernels": KernelSampler(VOCAB, Team(1))}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-k 50, top-p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "bias, 100 ids": {"logit_bias": tuple((7 * i, 1.0) for i in range(100))},
    "100 bad words": {"bad_words": tuple((i, i + 1) for i in range(100))},
    "logprobs": {"num_logprobs": 1},
    "logprobs, top 20": {"num_logprobs": 21},
}


def main() -> None:
    torch.set_num_threads(1)
    ceilings = [milliseconds(logits_of(batch).amax) for batch in BATCHES]
    print(f"{'ceiling: one pass':22}", *(f"{ms:7.2f}" for ms in ceilings))
    told: dict[str, dict[str, list[float]]] = {}
    for kind, sampler in SAMPLERS.items():
        told[kind] = {}
        print(f"by {kind}, batch", *BATCHES)
        for name, params in {**CASES, "grammar": {}}.items():
            steps = [step(sampler, batch, params, name == "grammar") for batch in BATCHES]
            told[kind][name] = [round(milliseconds(run), 3) for run in steps]
            print(f"{name:22}", *(f"{ms:7.2f}" for ms in told[kind][name]))
    print(json.dumps({"bench": "sampler", "vocab": VOCAB, "batches": BATCHES, "ms": told}))


def logits_of(batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 3.5 * torch.randn(batch, VOCAB, generator=generator)


def step(
    sampler: Sampler, batch: int, changes: dict[str, Any], has_grammar: bool
) -> Callable[[], object]:
    logits = logits_of(batch)
    outputs = np.random.default_rng(0).integers(0, VOCAB, 200)
    words = pack_words(range(0, VOCAB, 3), VOCAB) if has_grammar else None
    rows = []
    for seed in range(batch):
        params = SamplingParams(max_tokens=1000, seed=seed, **changes)
        rules = LogitRules.of(params, range(500), {2})
        if rules is not None:
            rules.catch_up(outputs)
        rows.append(SampleRow(params, 0, len(outputs), rules, words))

    @torch.inference_mode()
    def run() -> None:
        counts = [row.params.num_logprobs for row in rows]
        logprobs = StepLogprobs(logits, counts, sampler.logprob_table)
        logprobs.unpack(logprobs.pack(sampler.sample_tokens(logits, rows)).numpy())

    return run


def milliseconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(30):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    main()
