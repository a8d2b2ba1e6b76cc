"""The sampler as one would write it for one row, slowly: what the fast one is held against."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from engine.logit_rules import LogitRules, Words, pack_words
from engine.request import SamplingParams
from engine.sampler import SampleRow, gumbel_noise, noise_keys

VOCAB = 67  # no multiple of 32


@dataclass(frozen=True)
class Sample:
    """What a sample is when its next token is chosen."""

    params: SamplingParams
    prompt: tuple[int, ...] = (1,)
    outputs: tuple[int, ...] = ()
    end_token_ids: frozenset[int] = frozenset()
    grammar: frozenset[int] | None = None

    def row(self) -> SampleRow:
        rules = LogitRules.of(self.params, self.prompt, self.end_token_ids)
        if rules is not None:
            rules.catch_up(np.array(self.outputs, dtype=np.int64))
        words: Words | None = None
        if self.grammar is not None:
            words = pack_words(self.grammar, VOCAB)
        return SampleRow(self.params, 0, len(self.outputs), rules, words)


def plain_scores(logits: list[float], sample: Sample) -> list[float]:
    """What the chosen token is the largest of; -inf: it must not be chosen."""
    values = _penalized(_biased(_masked(logits, sample), sample), sample)
    params = sample.params
    if params.temperature == 0:
        return values
    top = max(values)
    values = [(value - top) / params.temperature for value in values]
    values = _top_p(_top_k(_min_p(values, params.min_p), params.top_k), params.top_p)
    keys = noise_keys([sample.row()]).view(np.int32).reshape(2, 1)
    noise: list[float] = gumbel_noise(torch.from_numpy(keys), len(logits))[0].tolist()
    return [value + g for value, g in zip(values, noise, strict=True)]


def _masked(logits: list[float], sample: Sample) -> list[float]:
    params = sample.params
    everything = set(range(len(logits)))
    may = everything if sample.grammar is None else everything & sample.grammar
    for more in (params.allowed_token_ids or everything, everything - _banned(sample)):
        may = may & set(more) or may
    return [value if i in may else -math.inf for i, value in enumerate(logits)]


def _banned(sample: Sample) -> set[int]:
    banned = set()
    for word in sample.params.bad_words:
        before = word[:-1]
        if len(before) <= len(sample.outputs):
            tail = sample.outputs[len(sample.outputs) - len(before) :]
            if tail == before:
                banned.add(word[-1])
    if len(sample.outputs) < sample.params.min_tokens:
        banned |= sample.end_token_ids
    return banned


def _biased(values: list[float], sample: Sample) -> list[float]:
    bias = dict(sample.params.logit_bias)
    return [value + bias.get(i, 0.0) for i, value in enumerate(values)]


def _penalized(values: list[float], sample: Sample) -> list[float]:
    params = sample.params
    result = []
    for i, value in enumerate(values):
        count = sample.outputs.count(i)
        if i in sample.prompt or count:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= params.frequency_penalty * count
        value -= params.presence_penalty * (count > 0)
        result.append(value)
    return result


def _min_p(values: list[float], min_p: float) -> list[float]:
    least = math.log(min_p) if min_p > 0 else -math.inf
    return [value if value >= least else -math.inf for value in values]


def _top_k(values: list[float], top_k: int) -> list[float]:
    if not 0 < top_k < len(values):
        return values
    least = sorted(values)[-top_k]
    return [value if value >= least else -math.inf for value in values]


def _top_p(values: list[float], top_p: float) -> list[float]:
    if top_p == 1.0:
        return values
    weights = [math.exp(value) for value in values]
    mass, least = 0.0, 0.0
    for weight in sorted(weights, reverse=True):
        if mass >= top_p * sum(weights):
            break
        mass, least = mass + weight, weight
    return [
        value if weight >= least else -math.inf
        for value, weight in zip(values, weights, strict=True)
    ]


ids = st.integers(0, VOCAB - 1)
few_ids = st.lists(ids, max_size=4, unique=True)


def _mostly(off: object, on: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(st.just(off), on)


def _pairs(bias: dict[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(bias.items())


params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    temperature=st.sampled_from((0.0, 0.5, 1.0, 2.0)),
    top_k=st.sampled_from((0, 1, 5, 60, 300)),
    top_p=st.sampled_from((1.0, 0.9, 0.3)),
    min_p=st.sampled_from((0.0, 0.05, 0.5, 1.0)),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from((0.0, 2.0, -1.5)),
    frequency_penalty=st.sampled_from((0.0, 0.75, -0.5)),
    repetition_penalty=st.sampled_from((1.0, 1.5, 0.5)),
    logit_bias=_mostly(
        (), st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=5).map(_pairs)
    ),
    min_tokens=st.sampled_from((0, 2, 50)),
    allowed_token_ids=_mostly((), few_ids.map(tuple)),
    bad_words=_mostly(
        (), st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple)
    ),
)

samples = st.builds(
    Sample,
    params=params_strategy,
    prompt=st.lists(ids, min_size=1, max_size=9).map(tuple),
    outputs=st.lists(st.integers(0, 5), max_size=9).map(tuple),
    end_token_ids=few_ids.map(frozenset),
    grammar=_mostly(None, st.lists(ids, min_size=1, max_size=9).map(frozenset)),
)


def random_logits(num_rows: int, seed: int) -> npt.NDArray[np.float32]:
    """[num_rows, VOCAB]; some of each row are equal, as those of a bfloat16 model are."""
    logits = 4 * np.random.default_rng(seed).standard_normal((num_rows, VOCAB))
    return np.where(logits > 3, np.round(logits), logits).astype(np.float32)
