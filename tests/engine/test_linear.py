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
