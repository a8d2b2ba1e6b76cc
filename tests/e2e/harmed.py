"""Two prefill workers and a decode worker, whose messages a test harms as it likes while they run.

Deadlines of the fabric are short, so that a fault costs a second or so. See kvfabric/faults.py.
"""

from pathlib import Path

from tests.e2e.cluster import UCX_ALONE, Cluster

ROLES = ("prefill", "prefill", "decode")


class HarmedCluster(Cluster):
    """See the module. Nothing is harmed at first."""

    def __init__(self, run_dir: Path, model_path: Path) -> None:
        super().__init__(
            run_dir,
            model_path,
            dtype="float32",
            num_blocks=400,
            slot_size=64 << 10,
            connect_timeout_s=1,
            send_timeout_s=1,
            first_frame_timeout_s=4,
            transfer_timeout_s=1,
        )
        self.worker_environ = UCX_ALONE
        self._plans = [run_dir / f"plan-{index}" for index in range(len(ROLES))]
        for index, role in enumerate(ROLES):
            self.worker(role, cores=index % 2, inject_faults=f"@{self._plans[index]}")

    def harm(self, rules: str, seed: int = 0) -> None:
        """From now on, by these rules alone; none: no more."""
        for index, plan in enumerate(self._plans):
            written = plan.with_suffix(".new")
            written.write_text(f"{rules},seed={seed + index}")
            written.rename(plan)
