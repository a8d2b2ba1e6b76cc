import subprocess
import sys

import pytest
import torch

from engine.linear import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_out", "num_in"), [(960, 576), (576, 1536), (77, 33)])
def test_rows_do_not_depend_on_their_batch(dtype: torch.dtype, num_out: int, num_in: int) -> None:
    """Bit for bit: the ground under equal tokens however requests are batched and split."""
    generator = torch.Generator().manual_seed(0)
    linear = Linear(torch.randn(num_out, num_in, generator=generator).to(dtype), None)
    x = torch.randn(64, num_in, generator=generator).to(dtype)
    together = linear(x)
    for first, count in ((0, 1), (5, 1), (0, 2), (3, 7), (32, 32)):
        assert torch.equal(linear(x[first : first + count]), together[first : first + count])


def test_is_the_product() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(20, 30, generator=generator), torch.randn(20, generator=generator)
    x = torch.randn(3, 30, generator=generator)
    assert torch.allclose(Linear(weight, bias)(x), x @ weight.T + bias, atol=1e-5)


_MANY_SIZES = """
import psutil, torch
from engine.linear import Linear

def resident(counts):
    for count in counts:
        for matrix in matrices:
            matrix(torch.ones(count, 64))
    return psutil.Process().memory_info().rss

matrices = [Linear(torch.ones(size, 64), None) for size in (64, 96, 128, 192)]
with torch.inference_mode():
    print(resident(range(1, 120)), resident(range(120, 400)))
"""


def test_memory_for_kernels_has_a_bound() -> None:
    """In a process of its own, as others' products have read the settings here. Unbounded it grows
    by more than a hundred megabytes."""
    told = subprocess.run(
        [sys.executable, "-c", _MANY_SIZES], check=True, stdout=subprocess.PIPE, timeout=60
    )
    before, after = map(int, told.stdout.split())
    assert after - before < 40 << 20
