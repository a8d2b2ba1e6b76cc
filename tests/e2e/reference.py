"""What transformers says to a prompt: the answers that ours must be, in float32."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """A model's greedy answers of `num_outputs` tokens, its end tokens not heeded."""

    def __init__(self, path: Path, num_outputs: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._num_outputs = num_outputs
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        if (key := tuple(prompt)) not in self._known:
            self._known[key] = self._generate(prompt)
        return self._known[key]

    def _generate(self, prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self._num_outputs,
                min_new_tokens=self._num_outputs,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


def prompts_of(lengths: Sequence[int], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(17, 49152) for _ in range(length)] for length in lengths]
