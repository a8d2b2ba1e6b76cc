"""Load against a running Baton (or any OpenAI-style server): TTFT, TPOT, ITL, goodput.

    python -m bench.serving --base-url http://127.0.0.1:8000 --model smollm2 \
        --model-path FOLDER --preset w2 --repeats 3

Prints the machine's ceiling, then a line a repeat, then one JSON line with the medians. Goodput is
the rate of requests that met both objectives (--slo-ttft-ms, --slo-tpot-ms), as DistServe counts.
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
from pathlib import Path

from bench import ceiling
from bench.load import Load, Record, Run, one_token_words, run_load

PRESETS: dict[str, dict[str, float]] = {
    "w1": {"concurrency": 1, "prompt_len": 128, "output_len": 128, "num_requests": 5},
    "w2": {"concurrency": 8, "prompt_len": 128, "output_len": 128, "num_requests": 16},
    "w3": {"concurrency": 4, "prompt_len": 1024, "output_len": 64, "num_requests": 8},
    "w4": {"concurrency": 1, "prompt_len": 2048, "output_len": 1, "num_requests": 4},
    "w5": {"concurrency": 4, "prompt_len": 128, "output_len": 256, "num_requests": 400,
           "duration_s": 30.0, "noise_interval_s": 2.0},
    "w6": {"concurrency": 4, "prompt_len": 64, "output_len": 32, "num_requests": 32,
           "shared_prefix_len": 1024},
}  # fmt: skip
"""Steady streams alone and in batches, long prompts, both together, a shared prefix."""

Numbers = dict[str, float]


def summarise(run: Run, slo_ttft_ms: float, slo_tpot_ms: float) -> dict[str, Numbers | float]:
    """The figures of one run; distributions in milliseconds."""
    answered = [record for record in run.records if record.is_ok]
    num_output = sum(record.num_output_tokens for record in answered)
    num_prompt = sum(record.num_prompt_tokens for record in answered)
    good = [r for r in answered if not r.is_cut and _meets(r, slo_ttft_ms, slo_tpot_ms)]
    tpots = [tpot for record in answered if (tpot := record.tpot_s) is not None]
    figures: dict[str, Numbers | float] = {
        "requests": len(run.records),
        "failures": sum(1 for r in run.records if not r.is_ok and not r.is_cut),
        "wall_s": round(run.wall_s, 3),
        "ttft_ms": _distribution([record.ttft_s for record in answered]),
        "tpot_ms": _distribution(tpots),
        "itl_ms": _distribution([gap for record in answered for gap in record.itl_s]),
        "max_itl_ms": _distribution([max(r.itl_s) for r in answered if r.itl_s]),
        "e2e_ms": _distribution([record.end_to_end_s for record in answered]),
        "output_tok_s": round(num_output / run.wall_s, 2),
        "total_tok_s": round((num_output + num_prompt) / run.wall_s, 2),
        "goodput_req_s": round(len(good) / run.wall_s, 3),
        "goodput_share": round(len(good) / len(run.records), 4) if run.records else 0.0,
    }
    if run.noise or run.num_noise_skipped:
        finished = [record for record in run.noise if record.is_ok and not record.is_cut]
        figures["noise_ttft_ms"] = _distribution([record.ttft_s for record in finished])
        figures["noise_answered"] = len(finished)
        figures["noise_skipped"] = run.num_noise_skipped
    return figures


def _meets(record: Record, slo_ttft_ms: float, slo_tpot_ms: float) -> bool:
    tpot = record.tpot_s or 0.0
    return record.ttft_s * 1e3 <= slo_ttft_ms and tpot * 1e3 <= slo_tpot_ms


def _distribution(seconds: list[float]) -> Numbers:
    if not seconds:
        return {"n": 0}
    ordered = sorted(seconds)
    return {
        "mean": round(statistics.fmean(ordered) * 1e3, 2),
        "p50": round(percentile(ordered, 0.50) * 1e3, 2),
        "p90": round(percentile(ordered, 0.90) * 1e3, 2),
        "p99": round(percentile(ordered, 0.99) * 1e3, 2),
        "max": round(ordered[-1] * 1e3, 2),
        "n": len(ordered),
    }


def percentile(ordered: list[float], q: float) -> float:
    """Linear between the two nearest ranks; `ordered` ascending, not empty, 0 <= q <= 1."""
    rank = q * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median(runs: list[dict[str, Numbers | float]]) -> dict[str, Numbers | float]:
    """Figure by figure; failures add up."""
    result: dict[str, Numbers | float] = {}
    for key, first in runs[0].items():
        values = [run[key] for run in runs]
        if isinstance(first, dict):
            tables = [value for value in values if isinstance(value, dict)]
            keys = set.intersection(*(set(table) for table in tables))
            result[key] = {
                name: round(statistics.median(table[name] for table in tables), 3)
                for name in sorted(keys)
            }
        else:
            numbers = [value for value in values if not isinstance(value, dict)]
            result[key] = round(
                sum(numbers) if key == "failures" else statistics.median(numbers), 4
            )
    return result


def _line(figures: dict[str, Numbers | float]) -> str:
    def p50_p99(key: str) -> str:
        table = figures[key]
        assert isinstance(table, dict)
        return f"{table.get('p50', '-')}/{table.get('p99', '-')}"

    return (
        f"TTFT {p50_p99('ttft_ms')} ms  TPOT {p50_p99('tpot_ms')} ms  ITL {p50_p99('itl_ms')} ms "
        f"(p50/p99)  {figures['output_tok_s']} output tok/s  {figures['total_tok_s']} total tok/s  "
        f"goodput {figures['goodput_req_s']} req/s  failures {figures['failures']}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2", help="name in the requests")
    parser.add_argument("--model-path", type=Path, required=True, help="tokenizer and weights")
    parser.add_argument("--preset", choices=sorted(PRESETS))
    parser.add_argument("--label", default="", help="goes into the JSON line")
    parser.add_argument("--repeats", type=int, default=1, help="the JSON line has their median")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=100.0)
    defaults = {f.name: f.default for f in dataclasses.fields(Load)}
    defaults |= {"num_requests": 16, "prompt_len": 128, "output_len": 64}
    for name, default in defaults.items():
        if name not in ("base_url", "model"):
            parser.add_argument(
                "--" + name.replace("_", "-"), type=type(default), help=f"default {default}"
            )
    arguments = parser.parse_args()
    preset = PRESETS.get(arguments.preset, {})
    for name, default in defaults.items():
        if getattr(arguments, name, 0) is None:
            setattr(arguments, name, preset.get(name, default))
    return arguments


def main() -> None:
    arguments = _arguments()
    names = [field.name for field in dataclasses.fields(Load)]
    load = Load(**{name: getattr(arguments, name) for name in names})
    limits = ceiling.measure(arguments.model_path)
    for line in limits.lines(load.prompt_len + load.shared_prefix_len):
        print(line, flush=True)
    words = one_token_words(arguments.model_path / "tokenizer.json")
    runs = []
    for repeat in range(arguments.repeats):
        run = asyncio.run(run_load(load, words, seed=arguments.seed + 1000 * repeat))
        runs.append(summarise(run, arguments.slo_ttft_ms, arguments.slo_tpot_ms))
        print(f"run {repeat + 1}: {_line(runs[-1])}", flush=True)
        for error in sorted({record.error for record in run.records if record.error})[:3]:
            print(f"  error: {error}")
    report = {
        "label": arguments.label,
        "preset": arguments.preset,
        "load": dataclasses.asdict(load),
        "repeats": arguments.repeats,
        "ceiling": dataclasses.asdict(limits),
        "median": median(runs),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
