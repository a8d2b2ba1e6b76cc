"""Reads request traces, plain or gzipped, and tells their format by what is in them.

* Mooncake: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.
* Azure: CSV with `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`.
* ServeGen rates: CSV with `client`, `window_start_s`, `rate_rps`, `dist`, `param1`, `param2`;
  lengths are drawn from a ServeGen lengths file (`lengths`), in the order of the clients there.
* ServeGen lengths: JSON lines with `input_tokens`, `output_tokens`; arrivals are Poisson.
* Lengths: CSV with `num_prefill_tokens`, `num_decode_tokens`; arrivals are Poisson.

What is drawn is drawn from a seed. Prompts without `hash_ids` share nothing.
"""

import ast
import csv
import gzip
import json
import random
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

BLOCK_SIZE = 512
WINDOW_S = 600.0


class Arrival(NamedTuple):
    at_s: float
    num_tokens: int
    num_outputs: int
    blocks: tuple[int, ...]
    """Names of its blocks of BLOCK_SIZE tokens; the last may be partial."""


class UnknownTrace(Exception):
    """The file is none of the formats."""


def read(
    path: Path, *, max_requests: int, rate: float = 5.0, seed: int = 0, lengths: Path | None = None
) -> list[Arrival]:
    """In order of arrival, from 0 s on. Raises UnknownTrace."""
    draw = random.Random(seed)
    names = count(1 << 40)  # of blocks that nobody shares
    with _open(path) as lines:
        first = lines.readline()
        lines.seek(0)
        if first.startswith("{"):
            rows = map(json.loads, lines)
            known = json.loads(first)
            if "hash_ids" in known:
                found: Iterable[Arrival] = map(_mooncake, rows)
            elif "input_tokens" in known:
                pairs = _servegen_lengths(rows, draw, max_requests)
                found = _poisson(pairs, rate, draw, names)
            else:
                raise UnknownTrace(f"{path}: JSON lines of neither Mooncake nor ServeGen")
        else:
            table = csv.DictReader(lines)
            fields = set(table.fieldnames or ())
            if "ContextTokens" in fields:
                found = _azure(table, names)
            elif "num_prefill_tokens" in fields:
                pairs = ((int(r["num_prefill_tokens"]), int(r["num_decode_tokens"])) for r in table)
                found = _poisson(pairs, rate, draw, names)
            elif "rate_rps" in fields and lengths is not None:
                with _open(lengths) as told:
                    distributions = _all_distributions(map(json.loads, told))
                found = _servegen(table, distributions, draw, names)
            else:
                raise UnknownTrace(f"{path}: ServeGen rates need --lengths; else none I know")
        arrivals = [one for one, _ in zip(_in_order(found), range(max_requests), strict=False)]
    start_s = arrivals[0].at_s
    return [one._replace(at_s=one.at_s - start_s) for one in arrivals]


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _in_order(found: Iterable[Arrival]) -> list[Arrival]:
    return sorted(found, key=lambda one: one.at_s)


def _mooncake(row: dict[str, Any]) -> Arrival:
    return Arrival(
        row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"])
    )


def _alone(at_s: float, num_tokens: int, num_outputs: int, names: Iterator[int]) -> Arrival:
    blocks = tuple(next(names) for _ in range(-(-num_tokens // BLOCK_SIZE)))
    return Arrival(at_s, num_tokens, num_outputs, blocks)


def _azure(table: Iterable[dict[str, str]], names: Iterator[int]) -> Iterator[Arrival]:
    for row in table:
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        yield _alone(at.timestamp(), *tokens, names)


def _poisson(
    pairs: Iterable[tuple[int, int]], rate: float, draw: random.Random, names: Iterator[int]
) -> Iterator[Arrival]:
    at_s = 0.0
    for num_tokens, num_outputs in pairs:
        at_s += draw.expovariate(rate)
        yield _alone(at_s, num_tokens, num_outputs, names)


Distribution = tuple[list[int], list[float]]
"""Values and their cumulated weights."""


def _distributions(row: dict[str, Any]) -> tuple[Distribution, Distribution]:
    told = (ast.literal_eval(row[name]) for name in ("input_tokens", "output_tokens"))
    inputs, outputs = (([*one], [*accumulate(one.values())]) for one in told)
    return inputs, outputs


def _all_distributions(
    rows: Iterable[dict[str, Any]],
) -> list[tuple[Distribution, Distribution]]:
    """Of the clients that sent something in the window that is told of."""
    found = [_distributions(row) for row in rows]
    return [one for one in found if all(values for values, _ in one)]


def _drawn(distribution: Distribution, draw: random.Random) -> int:
    values, weights = distribution
    return max(1, int(draw.choices(values, cum_weights=weights)[0]))


def _servegen_lengths(
    rows: Iterable[dict[str, Any]], draw: random.Random, num: int
) -> Iterator[tuple[int, int]]:
    """So many requests of the clients in turn."""
    clients = _all_distributions(rows)
    for index in range(num):
        inputs, outputs = clients[index % len(clients)]
        yield _drawn(inputs, draw), _drawn(outputs, draw)


def _servegen(
    table: Iterable[dict[str, str]],
    clients: list[tuple[Distribution, Distribution]],
    draw: random.Random,
    names: Iterator[int],
) -> Iterator[Arrival]:
    """Of the first window that is told: the gaps are drawn and rescaled so that they fill it."""
    rows = sorted(table, key=lambda row: float(row["window_start_s"]))
    start_s = float(rows[0]["window_start_s"])
    for index, row in enumerate(row for row in rows if float(row["window_start_s"]) == start_s):
        num = round(float(row["rate_rps"]) * WINDOW_S)
        shape, scale = float(row["param1"]), float(row["param2"])
        is_gamma = row["dist"].lower() == "gamma"
        drawn = draw.gammavariate if is_gamma else lambda a, b: draw.weibullvariate(b, a)
        gaps = [drawn(shape, scale) for _ in range(num)]
        inputs, outputs = clients[index % len(clients)]
        for at in accumulate(gaps):
            tokens = _drawn(inputs, draw), _drawn(outputs, draw)
            yield _alone(start_s + at * WINDOW_S / sum(gaps), *tokens, names)
