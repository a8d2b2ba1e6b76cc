"""What of the KV handoff a request feels: `python -m bench.handoff --model-path FOLDER`.

Prints the ceiling first: a bare ucxx loop between two processes, over the same transport, for the
bytes of each prompt length; and the copies that a frame costs beside it. Then it starts `baton up`
(flags behind `--` are its own) with one prefill and one decode worker, and sends, by length, fresh
prompts one at a time, decode otherwise idle:

* TTFT; the exposed handoff, from "last chunk computed" to "token 0 told by decode"; its parts;
* the full transfer, first frame packed → last frame installed, of the same prompt and one token
  more: prefill has it cached, decode has not (its cache is off). So it leaves at once and nothing
  overlaps it, but for the step of that token, which makes a short transfer look longer.

Then a burst: prompts of 47 MB (`--burst-tokens` of this model), handed over back to back, four at
once, from prefill's cache to a decode worker that runs four streams; ITL of these with and without,
in windows by turns; and how much of it their joining the batch does alone. The last line is one
JSON object.
The goals: exposed is at most 10 % of a full transfer of 50 ms or more, else 5 ms, and 2 % of TTFT
from 1,024 tokens on; the burst raises ITL p99 by 20 % at most.
"""

import argparse
import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import aiohttp
import torch

from bench.fabric_peer import Peer, Receiving
from bench.handoff_burst import Burst, installs, joins
from bench.handoff_copies import copies_gb_s
from bench.handoff_requests import PARTS, STAGES, TIMEOUT_S, Client, Prompts, Relay
from bench.idle import cluster, model_of
from bench.serving import percentile
from engine.config import ModelConfig

SLOT_NBYTES = 4 << 20
UNIT = 64 << 10
"""What bench.fabric_peer counts in."""


def ceilings(lengths: list[int], token_nbytes: int, reps: int = 9) -> dict[int, float]:
    """Milliseconds of bare ucxx for the KV of each length; nobody packs, checks or installs it."""
    receiving, peer = Receiving(SLOT_NBYTES), Peer(SLOT_NBYTES, checksum=False)
    try:
        found = {}
        for length in lengths:
            nbytes = -(-length * token_nbytes // UNIT) * UNIT
            times = [receiving.one("bare", peer, nbytes)[1] / 1e6 for _ in range(reps + 2)]
            found[length] = statistics.median(times[2:])
        return found
    finally:
        peer.close()
        receiving.close()


def summary(length: int, fresh: list[Relay], whole: list[Relay]) -> dict[str, Any]:
    """One prompt length. Times in ms; shares are of medians."""
    exposed, ttft = _median(r.exposed for r in fresh), _median(r.ttft for r in fresh)
    full = _median(r.transfer for r in whole)
    return {
        "tokens": length,
        "kv_mb": round(fresh[0].nbytes / 1e6, 1),
        "frames": fresh[0].frames,
        "ttft_ms": round(ttft, 1),
        "full_transfer_ms": round(full, 2),
        "stages_ms": {name: round(_median(r.stages[name] for r in whole), 2) for name in STAGES},
        "exposed_ms": {"p50": round(exposed, 2), "p90": round(_p90(fresh), 2)},
        "of_full": round(exposed / full, 4),
        "of_ttft": round(exposed / ttft, 4),
        "met": is_met(length, exposed, full, ttft),
        "parts_ms": {name: round(_median(r.parts[name] for r in fresh), 2) for name in PARTS},
    }


def is_met(length: int, exposed: float, full: float, ttft: float) -> bool:
    """The goals; see the module."""
    is_hidden = exposed <= (0.1 * full if full >= 50 else 5)
    return is_hidden and (length < 1024 or exposed <= 0.02 * ttft)


def _median(values: Any) -> float:
    return float(statistics.median(values))


def _p90(relays: list[Relay]) -> float:
    return percentile(sorted(r.exposed for r in relays), 0.9)


def report_burst(name: str, told: Burst, args: argparse.Namespace) -> dict[str, Any]:
    quiet, shaken = sorted(told.quiet), sorted(told.shaken)
    row = {
        "tokens": args.burst_tokens,
        "prompts": told.num_installs,
        "prompts_per_s": round(told.num_installs / told.wall_s, 2),
        "itl_p50_ms": [round(percentile(gaps, 0.5), 2) for gaps in (quiet, shaken)],
        "itl_p99_ms": [round(percentile(gaps, 0.99), 2) for gaps in (quiet, shaken)],
        "gaps": [len(quiet), len(shaken)],
        "p99_raised": round(told.p99_raised(), 3),
    }
    print(f"{name}: {row}", flush=True)
    return row


async def measure_joins(args: argparse.Namespace, per_s: float) -> dict[str, Any]:
    """As many steps with a prompt that has joined, and no KV that comes."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = Client(session, args.port, model_of(args.port))
        size = {"num_tokens": args.burst_tokens, "rounds": args.rounds}
        found = await joins(client, Prompts(args.seed + 1), interval_s=2 / per_s, **size)
    return report_burst("joins alone", found, args)


async def measure(args: argparse.Namespace, lengths: list[int]) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    prompts = Prompts(args.seed)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = Client(session, args.port, model_of(args.port))
        for length in (64, 512):  # connections are made, pages touched
            await client.relay(prompts.of(length))
        rows = []
        for length in lengths:
            fresh, whole = [], []
            for _ in range(args.reps):
                prompt = prompts.of(length)
                fresh.append(await client.relay(prompt))
                whole.append(await client.relay([*prompt, prompt[0]]))
            rows.append(summary(length, fresh, whole))
            print(rows[-1], flush=True)
        told: dict[str, Any] = {"rows": rows}
        if args.burst:
            size = {"num_tokens": args.burst_tokens, "rounds": args.rounds}
            found = await installs(client, prompts, num_prompts=args.burst, **size)
            told["burst"] = report_burst("burst", found, args)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.handoff",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-path", type=Path, required=True, help="of a prepared model")
    parser.add_argument("--lengths", default="16,64,256,1024,2048", help="in tokens; may be empty")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--burst", type=int, default=4, help="prompts handed over at once; 0: none")
    parser.add_argument("--burst-tokens", type=int, default=2048, help="of such a prompt")
    parser.add_argument("--rounds", type=int, default=4, help="of the burst")
    parser.add_argument("--port", type=int, default=8290)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="of `baton up`, behind --")
    args = parser.parse_args()
    if not any(flag.startswith("--router-args") for flag in args.flags):
        args.flags.append("--router-args=--prefill-at remote")  # else short prompts stay on decode
    lengths = [int(length) for length in args.lengths.split(",") if length]
    layers, heads, head_nbytes = ModelConfig.from_folder(args.model_path).kv_shape(torch.bfloat16)
    args.token_nbytes = 2 * layers * heads * head_nbytes
    floor_ms = ceilings(lengths, args.token_nbytes)
    for length, ms in floor_ms.items():
        print(f"ceiling: bare ucxx moves the KV of {length} tokens in {ms:.2f} ms")
    torch.set_num_threads(1)
    copies = copies_gb_s(args.model_path, SLOT_NBYTES)
    print(f"ceiling: a frame on one thread, GB/s: {copies}", flush=True)
    own = ["--model", str(args.model_path), *args.flags]
    with cluster([*own, "--decode-args=--no-prefix-caching"], args.port):
        told = asyncio.run(measure(args, lengths))
    if args.burst:
        with cluster(own, args.port):
            told["joins"] = asyncio.run(measure_joins(args, told["burst"]["prompts_per_s"]))
    floors = {length: round(ms, 2) for length, ms in floor_ms.items()}
    told |= {"bare_ucxx_ms": floors, "copies_gb_s": copies}
    print(json.dumps({"bench": "handoff", "reps": args.reps, **told}))


if __name__ == "__main__":
    main()
