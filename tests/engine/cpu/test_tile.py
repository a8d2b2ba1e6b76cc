"""Products in registers, and what stands beside them, against NumPy."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from engine.cpu import simd
from engine.cpu.jit import kernel
from engine.cpu.layout import KEYS, Floats
from engine.cpu.panels import as_elements, group_of, interleave, pack
from engine.cpu.tile import PANEL, TILE, add_weighted, height_of, multiply

DTYPES = [torch.float32, torch.bfloat16]


def as_tile(rows: torch.Tensor) -> torch.Tensor:
    group = group_of(rows.dtype)
    return rows.view(len(rows), -1, group).transpose(0, 1).contiguous().flatten()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("height", [1, 2, 4, 8, 12])
def test_products(height: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(height)
    x = torch.randn(height, 50, generator=generator).to(dtype)
    w = torch.randn(PANEL + 9, 50, generator=generator).to(dtype)  # a partial second panel
    panels = torch.empty(2 * PANEL * 50, dtype=dtype)
    pack(w, as_elements(panels))
    expected = torch.zeros(height, 2 * PANEL)
    expected[:, : len(w)] = x.float() @ w.float().T
    for panel in range(2):
        out = np.full(height * PANEL, 7, dtype=np.float32)
        tile, columns = as_elements(as_tile(x)), as_elements(panels)
        multiply(height, tile, 0, columns, panel * PANEL * 50, 50, out)
        got = torch.from_numpy(out).view(height, PANEL)
        torch.testing.assert_close(got, expected[:, panel * PANEL :][:, :PANEL], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("height", [1, 2, 4, 8, 12])
def test_weights_lie_row_by_row(height: int, dtype: torch.dtype) -> None:
    x = torch.rand(height, KEYS).to(dtype)
    w = torch.randn(PANEL, KEYS).to(dtype)
    panels = torch.empty(PANEL * KEYS, dtype=dtype)
    pack(w, as_elements(panels))
    sums = np.ones((height, 40), dtype=np.float32)
    add_weighted(
        height, as_elements(x).reshape(-1), as_elements(panels), 0, sums.reshape(-1), 3, 40
    )
    expected = torch.ones(height, 40)
    expected[:, 3 : 3 + PANEL] += x.float() @ w.float().T
    torch.testing.assert_close(torch.from_numpy(sums), expected, rtol=0, atol=2e-5)


def test_heights_hold_their_rows() -> None:
    heights = [height_of(rows) for rows in range(1, TILE + 1)]
    assert heights == [1, 2, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]


def test_gate_and_up_are_interleaved_by_sixteen() -> None:
    rows = torch.arange(64.0).unsqueeze(1)  # 32 of gate, 32 of up
    order = interleave(rows).flatten().tolist()
    assert order == [*range(16), *range(32, 48), *range(16, 32), *range(48, 64)]
    assert interleave(rows.flatten()).tolist() == order  # a bias


@kernel
def _exponentials(x: Floats, out: Floats) -> None:
    for i in range(0, len(x), simd.LANES):
        simd.store(out, i, simd.exp(simd.load(x, i)))


def test_exp() -> None:
    x = np.linspace(-86.9, 88, 4096, dtype=np.float32)
    out = np.empty_like(x)
    _exponentials(x, out)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=4e-7)
    edges = np.array([-np.inf, -1e30, -105, 0, *[0] * 12], dtype=np.float32)
    _exponentials(edges, out)
    assert out[:4].tolist() == [0, 0, 0, 1]


@kernel
def _powers(x: Floats, out: Floats) -> None:
    for i in range(0, len(x), simd.LANES):
        simd.store(out, i, simd.exp2(simd.load(x, i)))


def test_exp2() -> None:
    x = np.linspace(-124, 120, 4096, dtype=np.float32)
    out = np.empty_like(x)
    _powers(x, out)
    np.testing.assert_allclose(out, np.exp2(x.astype(np.float64)), rtol=4e-7)
    edges = np.array([-np.inf, -1e30, -155, 0, *[0] * 12], dtype=np.float32)
    _powers(edges, out)
    assert out[:4].tolist() == [0, 0, 0, 1]


@kernel
def _reductions(x: Floats, out: Floats) -> None:
    out[0] = simd.sum_lanes(simd.load(x, 0))
    out[1] = simd.max_lanes(simd.load(x, 0))


def test_reductions() -> None:
    x, out = np.arange(16, dtype=np.float32)[::-1].copy(), np.empty(2, dtype=np.float32)
    _reductions(x, out)
    assert out.tolist() == [120, 15]


@kernel
def _round(x: Floats, out: Floats) -> None:
    simd.store(out, 0, simd.load(x, 0))


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    x = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-7 - 2**-9, *[3.14159] * 12])
    out = torch.empty(16, dtype=torch.bfloat16)
    _round(x.numpy(), as_elements(out))
    assert torch.equal(out, x.bfloat16())
