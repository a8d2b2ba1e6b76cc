"""Run by test_portable.py in a process whose Numba compiles for an older CPU: products of bfloat16
and exponentials as such a CPU computes them. Prints what it finds, as JSON."""

import json
import sys

import numpy as np
import torch

from engine.cpu import simd
from engine.cpu.jit import kernel
from engine.cpu.layout import Floats
from engine.cpu.panels import as_elements, pack
from engine.cpu.tile import PANEL, multiply


@kernel
def _exponentials(x: Floats, out: Floats) -> None:
    for i in range(0, len(x), simd.LANES):
        simd.store(out, i, simd.exp(simd.load(x, i)))


@kernel
def _powers(x: Floats, out: Floats) -> None:
    for i in range(0, len(x), simd.LANES):
        simd.store(out, i, simd.exp2(simd.load(x, i)))


def product_error() -> float:
    """The largest difference between our product of bfloat16 and torch's in float32."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 64, generator=generator).bfloat16()
    w = torch.randn(PANEL, 64, generator=generator).bfloat16()
    panels, out = torch.empty(PANEL * 64, dtype=torch.bfloat16), np.empty(PANEL, dtype=np.float32)
    pack(w, as_elements(panels))
    multiply(1, as_elements(x).reshape(-1), 0, as_elements(panels), 0, 64, out)
    expected = (x.float() @ w.float().T)[0]
    return float((torch.from_numpy(out) - expected).abs().max())


def exp_error() -> float:
    """Relative, largest from -86 to 88."""
    x = np.linspace(-86, 88, 1024, dtype=np.float32)
    out = np.empty_like(x)
    _exponentials(x, out)
    expected = np.exp(x.astype(np.float64))
    return float((np.abs(out - expected) / expected).max())


def exp2_error() -> float:
    """Relative, largest from -124 to 0: what a softmax asks for."""
    x = np.linspace(-124, 0, 1024, dtype=np.float32)
    out = np.empty_like(x)
    _powers(x, out)
    expected = np.exp2(x.astype(np.float64))
    return float((np.abs(out - expected) / expected).max())


def zeros() -> list[float]:
    x = np.array([-np.inf, -1e30, -105, 0, *[0] * 12], dtype=np.float32)
    out, powers = np.empty_like(x), np.empty_like(x)
    _exponentials(x, out)
    x[2] = -155
    _powers(x, powers)
    return [float(value) for value in (*out[:4], *powers[:4])]


if __name__ == "__main__":
    found: dict[str, object] = {"product": product_error(), "exp": exp_error()}
    found |= {"exp2": exp2_error(), "zeros": zeros()}
    sys.stdout.write(json.dumps(found))
