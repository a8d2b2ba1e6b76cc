"""What the ranks of a worker hold, read when somebody scrapes: `process_*` is of rank 0 alone."""

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deploy.ranks import RankProcesses
from engine.engine import Engine
from kvfabric.fabric import Fabric

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class RanksCollector(Collector):
    """One sample for each rank; one that has just ended has none."""

    def __init__(self, engine: Engine, fabric: Fabric, processes: RankProcesses) -> None:
        self._engine = engine
        self._fabric = fabric
        self._pids = {0: os.getpid()} | {rank.rank: rank.popen.pid for rank in processes.others}

    def collect(self) -> Iterator[Metric]:
        ranks = GaugeMetricFamily(
            "baton_worker_ranks", "Processes that compute this worker's model together."
        )
        ranks.add_metric([], len(self._pids))
        yield ranks
        pools = GaugeMetricFamily(
            "baton_kv_pool_bytes", "Memory of the KV pool, by rank.", labels=["rank"]
        )
        for rank, nbytes in enumerate(self._engine.kv_pool_nbytes):
            pools.add_metric([str(rank)], nbytes)
        yield pools
        resident = GaugeMetricFamily(
            "baton_rank_resident_memory_bytes", "Memory of a rank's process.", labels=["rank"]
        )
        cpu = CounterMetricFamily(
            "baton_rank_cpu_seconds", "CPU time of a rank's process.", labels=["rank"]
        )
        for rank, pid in self._pids.items():
            if (found := _memory_and_cpu(pid)) is not None:
                resident.add_metric([str(rank)], found[0])
                cpu.add_metric([str(rank)], found[1])
        yield resident
        yield cpu
        yield self._handoff_bytes()

    def _handoff_bytes(self) -> Metric:
        """All other numbers of the fabric are of all ranks together."""
        moved = CounterMetricFamily(
            "baton_rank_handoff_bytes",
            "KV payload bytes moved by a rank: those of its own heads.",
            labels=["rank", "direction"],
        )
        for rank, stats in enumerate(self._fabric.rank_stats()):
            moved.add_metric([str(rank), "sent"], stats.sent_nbytes)
            moved.add_metric([str(rank), "received"], stats.received_nbytes)
        return moved


def _memory_and_cpu(pid: int) -> tuple[int, float] | None:
    """Resident bytes, and seconds of all threads in user and kernel mode; see proc(5)."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return None
    return pages * _PAGE_NBYTES, (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
