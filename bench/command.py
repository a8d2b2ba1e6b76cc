"""`baton bench`: load on a running cluster, and what its clients felt.

    baton bench                                     16 requests, one after the other
    baton bench --concurrency 8 --requests 64
    baton bench --rate 4 --duration-s 30            Poisson arrivals, whatever is unanswered
    baton bench --preset w5 --json out.json --plot out.png

TTFT: request sent to first token. TPOT: mean time of a token after that, per request. ITL: each gap
between two tokens. Goodput: requests a second that met both objectives. Prompts are random words,
one token each; every run draws others, so that no cache knows them.
"""

import asyncio
import json
import random
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.load import Load, Record, Run, run_load
from bench.serving import PRESETS, Numbers, summarise
from bench.words import NotEnoughWords, one_token_words
from deploy import target
from deploy.target import NoRouter, ask
from runtime.exit_status import INTERRUPTED

EXTRA = "scripts/venv bench, or pip install 'baton-serving[bench]'"
FLAGS = {
    "concurrency": "requests that are always under way",
    "rate": "arrivals a second instead; 0: --concurrency",
    "num_requests": "how many",
    "prompt_len": "tokens of each prompt",
    "output_len": "tokens of each answer",
    "shared_prefix_len": "tokens with which all prompts begin, before their own",
    "duration_s": "the run ends then, whatever is unanswered; 0: with the last answer",
    "noise_interval_s": "a long prompt beside the load, every so often; 0: none",
}
DEFAULTS = {
    "concurrency": 1, "rate": 0.0, "num_requests": 16, "prompt_len": 128, "output_len": 64,
    "shared_prefix_len": 0, "duration_s": 0.0, "noise_interval_s": 0.0,
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """The exit status: 1 where a request failed."""
    options = _options(argv)
    console = Console(stderr=True, highlight=False)
    try:
        with target.client_of(options) as http:
            model = options.model or str(ask(http, "/v1/models")["data"][0]["id"])
            load = _load(options, str(http.base_url).rstrip("/"), model)
            words = one_token_words(http, model)
            run = asyncio.run(_run(load, words, options.seed, console))
            stages = _stages(http, run.records)
    except (NoRouter, NotEnoughWords) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("baton: cut off; nothing was measured", file=sys.stderr)
        return INTERRUPTED
    figures = summarise(run, options.slo_ttft_ms, options.slo_tpot_ms)
    Console(highlight=False).print(table(figures, stages))
    for said in sorted({record.error for record in run.records if record.error})[:3]:
        print(f"  failed: {said}")
    return _write(options, load, run, figures, stages)


def _write(
    options: Namespace,
    load: Load,
    run: Run,
    figures: dict[str, Numbers | float],
    stages: Numbers,
) -> int:
    """The files that were asked for; the exit status."""
    try:
        if options.json:
            report = {"load": asdict(load), "seed": options.seed, "figures": figures,
                      "stages_ms": stages}  # fmt: skip
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        if options.plot:
            from bench.plot import draw  # matplotlib takes a second, and may be absent

            draw(options.plot, run, stages)
    except (OSError, ImportError) as error:
        hint = f" ({EXTRA})" if isinstance(error, ImportError) else ""
        print(f"baton: {error}{hint}", file=sys.stderr)
        return 1
    return 0 if figures["failures"] == 0 else 1


async def _run(load: Load, words: list[str], seed: int, console: Console) -> Run:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=load.num_requests)
        return await run_load(load, words, seed, on_end=lambda record: progress.advance(task))


def _stages(http: httpx.Client, records: Sequence[Record]) -> Numbers:
    """Means of the parts of the time to the first byte, in milliseconds, of the requests that the
    router still remembers; empty where it is none of ours."""
    sums: Numbers = {}
    count = 0
    for record in records[-64:]:
        if not record.is_ok or not record.request_id:
            continue
        try:
            told = ask(http, f"/v1/requests/{record.request_id}")
        except NoRouter:
            continue
        count += 1
        for name, ms in {**told["parts_ms"], "all else": told["residual_ms"] or 0.0}.items():
            sums[name] = sums.get(name, 0.0) + ms
    return {name: round(total / count, 3) for name, total in sums.items()}


def table(figures: dict[str, Numbers | float], stages: Numbers) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("")
    for name in ("mean", "p50", "p90", "p99", "max"):
        shown.add_column(name, justify="right", no_wrap=True)
    for key, name in (("ttft_ms", "TTFT ms"), ("tpot_ms", "TPOT ms"), ("itl_ms", "ITL ms"),
                      ("noise_ttft_ms", "long TTFT ms")):  # fmt: skip
        numbers = figures.get(key)
        if isinstance(numbers, dict) and numbers["n"]:
            cells = (f"{numbers[one]:.1f}" for one in ("mean", "p50", "p90", "p99", "max"))
            shown.add_row(name, *cells)
    shown.add_section()
    for key, name in (("output_tok_s", "output tok/s"), ("total_tok_s", "total tok/s"),
                      ("goodput_req_s", "goodput req/s"), ("requests", "requests"),
                      ("failures", "failures")):  # fmt: skip
        shown.add_row(name, f"{figures[key]:g}")
    if stages:
        shown.add_section()
        for stage, ms in stages.items():
            shown.add_row(f"{stage} ms", f"{ms:.1f}")
    return shown


def _load(options: Namespace, base_url: str, model: str) -> Load:
    preset = PRESETS.get(options.preset, {})
    wanted: dict[str, Any] = {
        name: preset.get(name, default)
        if getattr(options, name) is None
        else getattr(options, name)
        for name, default in DEFAULTS.items()
    }
    return Load(base_url=base_url, model=model, **wanted)


def _options(argv: Sequence[str]) -> Namespace:
    parser = target.parser_of("bench", __doc__)
    parser.add_argument("--model", default="", help="its name; else the one that is served")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="see bench/README.md")
    for name, text in FLAGS.items():
        kind = type(DEFAULTS[name])
        flag = "--requests" if name == "num_requests" else "--" + name.replace("_", "-")
        text += f" (default: {DEFAULTS[name]:g})"
        parser.add_argument(flag, dest=name, type=kind, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="of prompts")
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0, metavar="X")
    parser.add_argument("--slo-tpot-ms", type=float, default=100.0, metavar="X")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="TTFT, TPOT, ITL and stages")
    options = parser.parse_args(argv)
    for name in ("concurrency", "num_requests", "prompt_len", "output_len"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"{name.replace('_', '-')} must be at least 1, not {value}")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
