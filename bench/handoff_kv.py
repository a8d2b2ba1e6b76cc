"""The handoff of a large model's KV, without the model: `python -m bench.handoff_kv`.

Two processes with pools of KV of `--shape` (32 layers, 8 KV heads of 128, as of an 8B model: 131 kB
a token), copier and fabric as in workers. Prompts are computed by the clock, at `--tokens-per-s` in
chunks of 512; nothing else runs. Prints, by prompt length:

* the full transfer, when all KV is there from the start, and what of it each stage was busy;
* the exposed handoff, when it leaves chunk by chunk and the last chunk by groups of layers: from
  "last layer computed" to "committed".

The ceilings go first: one thread's memcpy, or the link where one is given: then the sender runs in
a network namespace of its own, behind a veth whose rate is limited. The last line is JSON.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.fabric_ceiling import memcpy_gbps
from bench.limited_link import NotPermitted, limited_link
from bench.relay import Pair, median
from bench.relay_peer import Setting, Shape

CHUNK = 512


def row(
    pair: Pair, shape: Shape, num_tokens: int, tokens_per_s: float, reps: int
) -> dict[str, Any]:
    pair.relay(num_tokens)
    whole = [pair.relay(num_tokens) for _ in range(reps)]
    chunk_s = CHUNK / tokens_per_s
    hidden = [pair.relay(num_tokens, chunk=CHUNK, chunk_s=chunk_s) for _ in range(reps)]
    full, exposed = median(whole, "total"), median(hidden, "exposed")
    nbytes = num_tokens * shape.token_nbytes
    build_ms = 1e3 * num_tokens / tokens_per_s
    return {
        "tokens": num_tokens,
        "kv_mb": round(nbytes / 1e6, 1),
        "frames": whole[0].frames,
        "full_transfer_ms": round(full, 2),
        "gb_s": round(nbytes / full / 1e6, 2),
        "stages_ms": {name: round(median(whole, name), 2) for name in ("pack", "ship", "install")},
        "exposed_ms": {
            "p50": round(exposed, 2),
            "worst": round(max(one.exposed for one in hidden), 2),
        },
        "of_full": round(exposed / full, 4),
        "of_ttft": round(exposed / (build_ms + exposed), 4),
        "met": exposed <= (0.1 * full if full >= 50 else 5),
    }


@contextmanager
def open_pair(setting: Setting, gbit_s: float) -> Iterator[Pair]:
    """On this host, or over a link of that rate. Raises NotPermitted."""
    if gbit_s:
        with limited_link(gbit_s) as link:
            pair = Pair(setting, (link.here, link.there), link.prefix)
            try:
                yield pair
            finally:
                pair.close()
        return
    pair = Pair(setting)
    try:
        yield pair
    finally:
        pair.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.handoff_kv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="32,8,128", help="layers, KV heads, head dimension")
    parser.add_argument("--lengths", default="16,64,256,1024,2048,4096,8000", help="in tokens")
    parser.add_argument("--tokens-per-s", type=float, default=5_000, help="of the computation")
    parser.add_argument("--link-gbit", type=float, default=0, help="0: within this host")
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    shape = Shape(*(int(number) for number in args.shape.split(",")))
    lengths = [int(length) for length in args.lengths.split(",")]
    if args.link_gbit:
        print(f"ceiling: a link of {args.link_gbit:g} Gbit/s, {args.link_gbit / 8:.3f} GB/s")
    else:
        print(f"ceiling: one thread copies {memcpy_gbps():.1f} GB/s")
    rows = []
    try:
        with open_pair(Setting(shape, max(lengths)), args.link_gbit) as pair:
            for length in lengths:
                rows.append(row(pair, shape, length, args.tokens_per_s, args.reps))
                print(rows[-1], flush=True)
            transports = pair.relay(lengths[0]).transports
    except NotPermitted as error:
        raise SystemExit(f"not measured: {error}") from error
    told = {"bench": "handoff_kv", "shape": args.shape, "link_gbit": args.link_gbit}
    told |= {"tokens_per_s": args.tokens_per_s, "transports": transports, "reps": args.reps}
    print(json.dumps({**told, "rows": rows}))


if __name__ == "__main__":
    main()
