"""`python -m bench.codec --model-path FOLDER`: what each KV codec costs, saves and changes.

1. The ceiling: one copy in memory. Then, per codec and on one thread: bytes against raw, encoding
   and decoding in GB/s of raw KV, one frame of the model's own KV of 160 tokens.
2. 240 chat prompts: the KV of each goes through the codec, as over a wire, and 32 tokens are
   decoded greedily behind it; beside them the same from untouched KV. Told: how far the logits of
   the first of them move, the share of prompts whose answer stays the same, and of the tokens up to
   the first that differs. Token 0 comes from prefill, as in the relay.

The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from bench.ceiling import measure
from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig
from engine.decoder import Decoder, load_decoder
from engine.engine_config import EngineConfig
from engine.kv_cache import KVCache
from engine.kv_codec import Codec, decode, encode

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS_EACH, GROUP, NUM_OUTPUTS = 16, 10, 8, 32
SUBJECTS = (
    *("the moon", "bread", "a bicycle", "the ocean", "Paris", "volcanoes", "chess", "honey"),
    *("a cat", "the violin", "winter", "gravity", "coffee", "a lighthouse", "paper", "dinosaurs"),
    *("the heart", "glass", "a river", "money", "silk", "trains", "salt", "the alphabet"),
)
QUESTIONS = (
    "Tell me three facts about {}.",
    "Write a short poem about {}.",
    "Explain {} to a child.",
    "Why do people care about {}?",
    "Write a JSON object that describes {}.",
    "What is the history of {}?",
    "Give me a riddle whose answer is {}.",
    "Translate 'I like {}' into French.",
    "Describe {} in one sentence.",
    "Compare {} with a mountain.",
)


@dataclass(frozen=True, slots=True)
class _Part:
    """A `KVRange`: the first tokens of a sequence, all layers and heads."""

    num_tokens: int
    num_layers: int
    num_heads: int
    first_token: int = 0
    first_layer: int = 0
    first_head: int = 0


class Engine:
    """One model and a pool: half of its blocks untouched, the other half through a codec."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        self.config = ModelConfig.from_folder(folder)
        self._decoder: Decoder = load_decoder(
            EngineConfig(folder, num_threads=num_threads), self.config, self.config.dtype, CPU
        )
        self.kv = KVCache(self.config, 2 * GROUP * BLOCKS_EACH, BLOCK_SIZE, self.config.dtype, CPU)
        self.tables = np.arange(2 * GROUP * BLOCKS_EACH).reshape(2, GROUP, BLOCKS_EACH)

    @torch.inference_mode()
    def step(self, rows: list[BatchRow]) -> Tensor:
        """Logits of each row, [rows, vocab]."""
        batch = BatchInput.build(rows, BLOCK_SIZE, CPU)
        return self._decoder.forward(batch, self.kv).logits.clone()

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        """Into the first half; token 0 of each."""
        rows = [
            BatchRow(np.array(prompt), 0, table, wants_logits=True)
            for prompt, table in zip(prompts, self.tables[0], strict=False)
        ]
        return [int(self.step([row]).argmax()) for row in rows]

    def hand_over(self, codec: Codec, prompts: list[list[int]]) -> None:
        """From the first half to the other."""
        config, head_dim = self.config, self.config.head_dim
        for prompt, source, target in zip(prompts, *self.tables, strict=False):
            part = _Part(len(prompt), config.num_layers, config.num_kv_heads)
            raw = torch.empty(self.kv.payload_nbytes(part), dtype=torch.uint8)
            self.kv.gather(source.tolist(), part, raw)
            if codec is not Codec.RAW:
                out, back = torch.empty_like(raw), torch.empty_like(raw)
                nbytes = encode(codec, raw, config.dtype, head_dim, out)
                assert nbytes is not None, "real KV has no infinities, and its exponents repeat"
                decode(codec, out[:nbytes], config.dtype, head_dim, back)
                raw = back
            self.kv.scatter(target.tolist(), part, raw)

    def decode(self, prompts: list[list[int]], first: list[int]) -> tuple[Tensor, Tensor]:
        """Both halves at once: logits of the first step [2, n, vocab], tokens [2, n, outputs]."""
        count = len(prompts)
        tokens = [[[token] for token in first] for _ in range(2)]
        first_logits = torch.empty(0)
        for index in range(NUM_OUTPUTS):
            rows = [
                BatchRow(
                    np.array(tokens[half][i][-1:]),
                    len(prompts[i]) + index,
                    self.tables[half][i],
                    wants_logits=True,
                )
                for half, i in product(range(2), range(count))
            ]
            logits = self.step(rows).view(2, count, -1)
            if not index:
                first_logits = logits
            for half, i in product(range(2), range(count)):
                tokens[half][i].append(int(logits[half, i].argmax()))
        return first_logits, torch.tensor(tokens)[:, :, 1:]


def chat_prompts(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [question.format(subject) for subject, question in product(SUBJECTS, QUESTIONS)]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for text in texts
    ]


def effect(engine: Engine, codec: Codec, prompts: list[list[int]]) -> dict[str, float]:
    moved, spread, agreeing, until = [], [], 0, []
    for group in _groups(prompts):
        first = engine.prefill(group)
        engine.hand_over(codec, group)
        logits, tokens = engine.decode(group, first)
        moved.append((logits[0] - logits[1]).abs().amax(-1))
        spread.append(logits[0].std(-1))
        same = tokens[0] == tokens[1]  # [n, outputs]
        agreeing += int(same.all(-1).sum())
        until += same.int().cumprod(-1).sum(-1).tolist()
    largest = torch.cat(moved)
    return {
        "prompts": len(prompts),
        "logits_max_moved_median": round(float(largest.median()), 4),
        "logits_max_moved_worst": round(float(largest.max()), 4),
        "logits_std": round(float(torch.cat(spread).mean()), 3),
        "answers_equal": round(agreeing / len(prompts), 4),
        "tokens_until_first_difference": round(sum(until) / len(until) / NUM_OUTPUTS, 4),
    }


def _groups(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    for first in range(0, len(prompts), GROUP):
        yield prompts[first : first + GROUP]


def speed(engine: Engine, codec: Codec, prompts: list[list[int]]) -> dict[str, float]:
    """One frame of the model's own KV; the best of five."""
    config = engine.config
    part = _Part(BLOCKS_EACH * BLOCK_SIZE, config.num_layers, config.num_kv_heads)
    engine.prefill([list(chain(*prompts))[: part.num_tokens]])
    raw = torch.empty(engine.kv.payload_nbytes(part), dtype=torch.uint8)
    engine.kv.gather(engine.tables[0, 0].tolist(), part, raw)
    out, back = torch.empty_like(raw), torch.empty_like(raw)
    encode_s, decode_s, nbytes = [], [], 0
    for _ in range(5):
        began = time.perf_counter()
        nbytes = encode(codec, raw, config.dtype, config.head_dim, out) or len(raw)
        done = time.perf_counter()
        decode(codec, out[:nbytes], config.dtype, config.head_dim, back)
        encode_s.append(done - began)
        decode_s.append(time.perf_counter() - done)
    return {
        "ratio": round(nbytes / len(raw), 3),
        "encode_gb_s": round(len(raw) / min(encode_s) / 1e9, 2),
        "decode_gb_s": round(len(raw) / min(decode_s) / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print(measure(args.model_path).lines(128)[0])
    engine = Engine(args.model_path, args.threads)
    prompts = chat_prompts(args.model_path)
    torch.set_num_threads(1)
    figures: dict[str, dict[str, float]] = {}
    for codec in Codec:
        figures[codec.name.lower()] = effect(engine, codec, prompts)
        if codec is not Codec.RAW:
            figures[codec.name.lower()] |= speed(engine, codec, prompts)
        print(codec.name.lower(), figures[codec.name.lower()])
    print(json.dumps({"bench": "codec", "model": args.model_path.name, "codecs": figures}))


if __name__ == "__main__":
    main()
