"""How fast the fabric is, beside what it stands on.

    python -m bench.fabric [--transport shm|tcp] [--sizes 256KiB,4MiB,64MiB] [--reps 15]

Prints the physical ceilings first (one thread's memcpy, `ucx_perftest`), then, for each transfer
size, between the same kind of two processes and in turn: bare ucxx (messages of a slot's size, a
window of four), the fabric without checksums, and the fabric with them. Times run from the sender's
decision to send to the receiver's last byte installed, on the clock that processes of one host
share. Sources and sinks touch no byte, for neither does bare ucxx. Only ratios within one run mean
anything. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
from dataclasses import dataclass

from bench.fabric_ceiling import memcpy_gbps, perftest_gbps
from bench.fabric_peer import Peer, Receiving

UCX_TLS = {"shm": "posix,sysv,cma,tcp,self", "tcp": "tcp,self"}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
WARM_UP_NBYTES = 64 << 20  # shared memory queues are of fresh pages until once around
VARIANTS = ("bare", "fabric", "fabric_checksum")


@dataclass(frozen=True, slots=True)
class Row:
    """One size: median and best time of each variant."""

    nbytes: int
    median_us: dict[str, float]
    best_us: dict[str, float]

    def gbps(self, variant: str) -> float:
        return self.nbytes / self.median_us[variant] / 1e3

    def ratio(self, variant: str) -> float:
        return self.median_us["bare"] / self.median_us[variant]

    def __str__(self) -> str:
        cells = (
            f"{self.median_us[v]:>8.0f} {self.best_us[v]:>8.0f} "
            f"{self.gbps(v):>6.2f} {self.ratio(v):>5.2f}"
            for v in VARIANTS
        )
        return f"{self.nbytes >> 10:>8} KiB | " + " | ".join(cells)


def parse_size(text: str) -> int:
    for unit, nbytes in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * nbytes)
    return int(text)


def measure(receiving: Receiving, peers: dict[str, Peer], nbytes: int, reps: int) -> Row:
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for rep in range(reps + 2):
        for variant in VARIANTS:
            ns = receiving.one(variant, peers[variant], nbytes)
            if rep >= 2:  # connections are made and pages touched
                times[variant].append(ns / 1e3)
    return Row(
        nbytes,
        {v: statistics.median(t) for v, t in times.items()},
        {v: min(t) for v, t in times.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.fabric", description=__doc__)
    parser.add_argument("--transport", choices=sorted(UCX_TLS), default="shm")
    parser.add_argument("--sizes", default="64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB")
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--slot", default="4MiB", help="largest payload of a frame")
    args = parser.parse_args()
    sizes, slot_nbytes = [parse_size(s) for s in args.sizes.split(",")], parse_size(args.slot)

    os.environ["UCX_TLS"] = UCX_TLS[args.transport]  # before UCX is first used, and inherited
    memcpy = memcpy_gbps()
    print(f"ceiling: one thread copies {memcpy:.1f} GB/s")
    perftest = perftest_gbps(slot_nbytes)
    if perftest is None:
        print("ceiling: no ucx_perftest that listens")
    else:
        print(f"ceiling: ucx_perftest tag_bw -E sleep {perftest:.2f} GB/s at {args.slot}")

    receiving = Receiving(slot_nbytes)
    plain, checked = Peer(slot_nbytes, checksum=False), Peer(slot_nbytes, checksum=True)
    peers = {"bare": plain, "fabric": plain, "fabric_checksum": checked}
    try:
        print(f"{'size':>12} | " + " | ".join(f"{v:<30}" for v in VARIANTS))
        columns = f"{'med us':>8} {'best us':>8} {'GB/s':>6} {'ratio':>5}"
        print(f"{'':>12} | " + " | ".join(columns for _ in VARIANTS))
        rows = []
        measure(receiving, peers, WARM_UP_NBYTES, reps=1)
        for nbytes in sizes:
            rows.append(measure(receiving, peers, nbytes, args.reps))
            print(rows[-1], flush=True)
        transports = receiving.transports
    finally:
        plain.close()
        checked.close()
        receiving.close()
    print(f"transports in use: {', '.join(transports)}")
    print(json.dumps(summary(args, memcpy, perftest, transports, rows)))


def summary(
    args: argparse.Namespace,
    memcpy: float,
    perftest: float | None,
    transports: tuple[str, ...],
    rows: list[Row],
) -> dict[str, object]:
    return {
        "bench": "fabric",
        "transport": args.transport,
        "transports_in_use": transports,
        "slot_nbytes": parse_size(args.slot),
        "memcpy_gbps": round(memcpy, 2),
        "perftest_gbps": None if perftest is None else round(perftest, 2),
        "rows": [
            {
                "nbytes": row.nbytes,
                "median_us": {v: round(t, 1) for v, t in row.median_us.items()},
                "best_us": {v: round(t, 1) for v, t in row.best_us.items()},
                "ratio_to_bare": {v: round(row.ratio(v), 3) for v in VARIANTS},
            }
            for row in rows
        ],
    }


if __name__ == "__main__":
    main()
