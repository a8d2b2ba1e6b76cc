"""Small arrays from the host to the device, without a wait: one pinned buffer, one queued copy.

`torch.tensor(values, device="cuda")` copies from pageable memory, and returns when the device has
come to it: behind everything queued before. Knows nothing of what the numbers mean.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class HostCopy(NamedTuple):
    """Some 1-d arrays, each on both sides, in the order given."""

    host: list[Tensor]
    """Pinned, if the device is not the host itself; not to be written."""
    device: list[Tensor]


def copy_to_device(
    parts: Sequence[npt.NDArray[np.integer]], device: torch.device, dtype: torch.dtype = torch.int64
) -> HostCopy:
    """The parts, flattened, as integers of `dtype`; queued on the current stream."""
    sizes = [part.size for part in parts]
    # The caching host allocator reuses a pinned buffer only after the copies that read it.
    host = torch.empty(sum(sizes), dtype=dtype, pin_memory=device.type == "cuda")
    flat = [part.reshape(-1) for part in parts]
    np.concatenate(flat, out=host.numpy(), casting="same_kind")  # host memory
    packed = host.to(device, non_blocking=True)
    return HostCopy(_split(host, sizes), _split(packed, sizes))


def _split(packed: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = accumulate(sizes)
    return [packed[end - size : end] for size, end in zip(sizes, ends, strict=True)]
