"""What the tests of this folder run on: two workers of each role, whose blocks differ in size."""

from dataclasses import dataclass

from tests.e2e.cluster import Cluster, WorkerProcess
from tests.e2e.reference import Reference

BLOCK = 16
CHUNK = 128
MAX_MODEL_LEN = 640
NUM_OUTPUTS = 8
LONGEST = MAX_MODEL_LEN - NUM_OUTPUTS
POOL_TOKENS = 4800


@dataclass
class Relay:
    """Workers of both block sizes, and what transformers says to each prompt."""

    workers: dict[tuple[str, int], WorkerProcess]
    cluster: Cluster
    expected: Reference
    token_nbytes: int
    is_by_ucx: bool
    """KV; else it is read where it lies."""
