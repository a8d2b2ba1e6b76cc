"""What the machine itself allows: printed before any measurement, so that no figure stands alone.

Decode at batch 1 must read all weights once a token; prefill must multiply each token by them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Ceiling:
    """Measured just now, on the cores this process may use."""

    num_threads: int
    read_gb_s: float
    """Memory read by one pass over more than any cache holds."""
    copy_gb_s: float
    """One copy in memory, counted one way."""
    matmul_gflop_s: float
    """bf16 [512, 1024] x [1024, 4096]."""
    weights_nbytes: int

    @property
    def tpot_floor_ms(self) -> float:
        return self.weights_nbytes / self.read_gb_s / 1e6

    def ttft_floor_ms(self, prompt_len: int) -> float:
        """Two operations a weight (bf16: two bytes) and token; attention comes on top."""
        return self.weights_nbytes * prompt_len / self.matmul_gflop_s / 1e6

    def lines(self, prompt_len: int) -> list[str]:
        return [
            f"ceiling with {self.num_threads} threads: read {self.read_gb_s:.1f} GB/s, "
            f"copy {self.copy_gb_s:.1f} GB/s, bf16 matmul {self.matmul_gflop_s:.0f} GFLOP/s",
            f"weights {self.weights_nbytes / 1e6:.0f} MB: TPOT at batch 1 is at least "
            f"{self.tpot_floor_ms:.1f} ms, TTFT of {prompt_len} tokens at least "
            f"{self.ttft_floor_ms(prompt_len):.0f} ms",
        ]


def measure(model_path: Path) -> Ceiling:
    """Takes about two seconds and 512 MB."""
    source = torch.ones(64 << 20)  # 256 MB of float32
    target = torch.empty_like(source)
    a = torch.randn(512, 1024, dtype=torch.bfloat16)
    b = torch.randn(1024, 4096, dtype=torch.bfloat16)
    nbytes = source.nbytes
    return Ceiling(
        num_threads=torch.get_num_threads(),
        read_gb_s=nbytes / _best_s(source.sum) / 1e9,
        copy_gb_s=nbytes / _best_s(lambda: target.copy_(source)) / 1e9,
        matmul_gflop_s=2 * 512 * 1024 * 4096 / _best_s(lambda: a @ b) / 1e9,
        weights_nbytes=weights_nbytes(model_path),
    )


def weights_nbytes(model_path: Path) -> int:
    """Of a prepared model, as it is stored."""
    return sum(file.stat().st_size for file in model_path.glob("*.safetensors"))


def _best_s(work: Callable[[], object], repeats: int = 7) -> float:
    work()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
