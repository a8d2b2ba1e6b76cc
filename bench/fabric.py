"""How fast the fabric is, beside what it stands on.

    python -m bench.fabric [--transport shm|tcp] [--sizes 256KiB,8MiB,64MiB] [--reps 15]
    python -m bench.fabric --link-gbit 10    # TCP between two network namespaces

Prints the physical ceilings first (one thread's memcpy), then, for each transfer size, between the
same kind of two processes and in turn:

* bare ucxx: messages of a slot's size, a window of four, out of buffers that are there;
* `ship` alone: the same by the fabric, packed frames, without checksums and with them, and without
  the short way within a host (kvfabric/direct.py), where there is one. Of both: from the first
  message handed to the network to the end of the last, at the sender. Beside it the whole way, from
  the decision to send (in another thread) to the receiver's last byte;
* `ucx_perftest tag_bw -E sleep`, for messages of a slot's size and of the whole size, one buffer
  again and again; without error handling, and with it (`-e`), as endpoints need that are to notice
  a peer's end.

Then the whole pipeline, from the decision to send until all is committed: pack out of a pool of KV
in an 8B model's shape, ship, install into another pool; by size, codec and transfers at once. Only
ratios within one run mean anything. The last line is one JSON object. Goals: `ship` without
checksums, from 8 MiB on, at least 0.85 of bare ucxx and 0.70 of ucx_perftest.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from bench.fabric_ceiling import memcpy_gbps, perftest_gbps
from bench.fabric_peer import Peer, Receiving
from bench.limited_link import LOOPBACK, Link, NotPermitted, limited_link
from bench.relay import Pair, median
from bench.relay_peer import Setting, Shape
from engine.kv_codec import Codec

UCX_TLS = {"shm": "posix,sysv,cma,tcp,self", "tcp": "tcp,self"}
UCX_ALONE = {"shm": "posix,sysv,tcp,self", "tcp": "tcp,self"}
"""Nothing of ours beside it."""
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
WARM_UP_NBYTES = 64 << 20  # shared memory queues are of fresh pages until once around
VARIANTS = ("bare", "fabric", "fabric_checksum", "fabric_ucx")
SHAPE = Shape(32, 8, 128)


@dataclass(frozen=True, slots=True)
class Row:
    """One size: medians of each variant, and what ucx_perftest says of it."""

    nbytes: int
    ship_us: dict[str, float]
    whole_us: dict[str, float]
    perftest_gbps: float | None
    """For messages of this size."""
    perftest_e_gbps: float | None
    """With error handling."""

    def gbps(self, variant: str) -> float:
        return self.nbytes / self.ship_us[variant] / 1e3

    def ratio(self, variant: str) -> float:
        return self.ship_us["bare"] / self.ship_us[variant]

    def __str__(self) -> str:
        cells = (
            f"{self.ship_us[v]:>8.0f} {self.gbps(v):>6.2f} {self.ratio(v):>5.2f} "
            f"{self.whole_us[v]:>8.0f}"
            for v in VARIANTS
        )
        perftest = f"{_told(self.perftest_gbps):>8} {_told(self.perftest_e_gbps):>6}"
        return f"{self.nbytes >> 10:>8} KiB | {' | '.join(cells)} | {perftest}"

    def told(self) -> dict[str, Any]:
        return {
            "nbytes": self.nbytes,
            "ship_us": {v: round(t, 1) for v, t in self.ship_us.items()},
            "whole_us": {v: round(t, 1) for v, t in self.whole_us.items()},
            "ratio_to_bare": {v: round(self.ratio(v), 3) for v in VARIANTS},
            "perftest_gbps": self.perftest_gbps and round(self.perftest_gbps, 2),
            "ratio_to_perftest": self.perftest_gbps
            and round(self.gbps("fabric") / self.perftest_gbps, 3),
            "perftest_e_gbps": self.perftest_e_gbps and round(self.perftest_e_gbps, 2),
        }


def _told(gbps: float | None) -> str:
    return "-" if gbps is None else f"{gbps:.2f}"


def parse_size(text: str) -> int:
    for unit, nbytes in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * nbytes)
    return int(text)


def measure(
    receiving: Receiving, peers: dict[str, Peer], nbytes: int, reps: int, link: Link
) -> Row:
    ship: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    whole: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for rep in range(reps + 2):
        for variant in VARIANTS:
            ship_ns, whole_ns = receiving.one(variant, peers[variant], nbytes)
            if rep >= 2:  # connections are made and pages touched
                ship[variant].append(ship_ns / 1e3)
                whole[variant].append(whole_ns / 1e3)
    count = _iterations(nbytes)
    perftest, perftest_e = (
        perftest_gbps(nbytes, count, notices_failure=notices, link=link)
        for notices in (False, True)
    )
    return Row(nbytes, _medians(ship), _medians(whole), perftest, perftest_e)


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {variant: statistics.median(values) for variant, values in times.items()}


def _iterations(nbytes: int) -> int:
    return max(10, min(800, (1 << 30) // nbytes))


def ship_rows(
    transport: str, sizes: Sequence[int], slot_nbytes: int, reps: int, link: Link
) -> tuple[list[Row], Any]:
    receiving = Receiving(slot_nbytes, link.here)
    plain, checked = (
        Peer(slot_nbytes, checksum=checksum, tls=UCX_TLS[transport], link=link)
        for checksum in (False, True)
    )
    ucx = Peer(slot_nbytes, checksum=False, tls=UCX_ALONE[transport], link=link)
    peers = {"bare": plain, "fabric": plain, "fabric_checksum": checked, "fabric_ucx": ucx}
    try:
        print(f"{'`ship` alone':>12} | " + " | ".join(f"{v:<30}" for v in VARIANTS))
        columns = f"{'us':>8} {'GB/s':>6} {'ratio':>5} {'whole us':>8}"
        print(f"{'':>12} | " + " | ".join(columns for _ in VARIANTS) + " | perftest,   -e")
        rows = []
        measure(receiving, peers, WARM_UP_NBYTES, 1, link)
        for nbytes in sizes:
            rows.append(measure(receiving, peers, nbytes, reps, link))
            print(rows[-1], flush=True)
        return rows, receiving.transports
    finally:
        for peer in (plain, checked, ucx):
            peer.close()
        receiving.close()


def pipeline_rows(
    args: argparse.Namespace, sizes: Sequence[int], link: Link
) -> list[dict[str, Any]]:
    """Latency until the last of the transfers is committed; GB/s of raw KV, all together."""
    tokens = [max(1, nbytes // SHAPE.token_nbytes) for nbytes in sizes]
    setting = Setting(SHAPE, max(tokens), parse_size(args.slot))
    pair = Pair(setting, (link.here, link.there), link.prefix)
    rows = []
    try:
        for codec in (Codec[name.upper()] for name in args.codecs.split(",")):
            for count in (int(number) for number in args.concurrency.split(",")):
                for num_tokens in tokens:
                    codecs = () if codec is Codec.RAW else (int(codec),)
                    runs = [
                        pair.relay(num_tokens, count=count, codecs=codecs)
                        for _ in range(args.pipeline_reps + 1)
                    ][1:]
                    nbytes, ms = count * num_tokens * SHAPE.token_nbytes, median(runs, "total")
                    rows.append(
                        {
                            "codec": codec.name.lower(),
                            "at_once": count,
                            "mib_each": round(nbytes / count / (1 << 20), 2),
                            "ms": round(ms, 2),
                            "gb_s": round(nbytes / ms / 1e6, 3),
                            "of_raw": round(runs[0].nbytes / nbytes, 3),
                        }
                    )
                    print(f"pipeline: {rows[-1]}", flush=True)
    finally:
        pair.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.fabric",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--transport", choices=sorted(UCX_TLS), default="shm")
    parser.add_argument("--sizes", default="64KiB,256KiB,1MiB,8MiB,16MiB,64MiB,256MiB")
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--slot", default="4MiB", help="largest payload of a frame")
    parser.add_argument("--pipeline-sizes", default="1MiB,8MiB,64MiB")
    parser.add_argument("--pipeline-reps", type=int, default=5, help="0: no pipeline")
    parser.add_argument("--codecs", default="raw,planes,int8")
    parser.add_argument("--concurrency", default="1,4", help="transfers at once")
    parser.add_argument("--link-gbit", type=float, default=0, help="0: within this host")
    args = parser.parse_args()
    if args.link_gbit:
        args.transport = "tcp"
    os.environ["UCX_TLS"] = UCX_TLS[args.transport]  # before UCX is first used, and inherited
    try:
        with limited_link(args.link_gbit) if args.link_gbit else nullcontext(LOOPBACK) as link:
            print(json.dumps(_measured(args, link)))
    except NotPermitted as error:
        raise SystemExit(f"not measured: {error}") from error


def _measured(args: argparse.Namespace, link: Link) -> dict[str, Any]:
    sizes, slot_nbytes = [parse_size(s) for s in args.sizes.split(",")], parse_size(args.slot)
    memcpy, perftest = memcpy_gbps(), perftest_gbps(slot_nbytes, link=link)
    print(f"ceiling: one thread copies {memcpy:.1f} GB/s")
    if args.link_gbit:
        print(f"ceiling: a link of {args.link_gbit:g} Gbit/s, {args.link_gbit / 8:.3f} GB/s")
    told = "none that listens" if perftest is None else f"{perftest:.2f} GB/s at {args.slot}"
    print(f"ceiling: ucx_perftest tag_bw -E sleep: {told}")
    rows, transports = ship_rows(args.transport, sizes, slot_nbytes, args.reps, link)
    print(f"transports in use: {', '.join(transports)}")
    pipeline = []
    if args.pipeline_reps:
        pipeline = pipeline_rows(
            args, [parse_size(s) for s in args.pipeline_sizes.split(",")], link
        )
    return {
        "bench": "fabric",
        "transport": args.transport,
        "link_gbit": args.link_gbit,
        "transports_in_use": transports,
        "slot_nbytes": slot_nbytes,
        "memcpy_gbps": round(memcpy, 2),
        "perftest_gbps": perftest and round(perftest, 2),
        "rows": [row.told() for row in rows],
        "pipeline": pipeline,
    }


if __name__ == "__main__":
    main()
