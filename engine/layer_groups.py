"""Where a forward pass tells that the KV of some more layers is there. Pure.

The last chunk of a prompt is what its handoff is felt by: its frames leave in groups of layers,
while later layers are computed, and the last group while the logits are. Each group is half of what
is left, so that little is left at the end, and few groups are told of: each wakes three threads.
"""

from collections.abc import Callable
from dataclasses import dataclass

MIN_TOKENS = 64
"""A step of fewer is so short, and so little KV, that it is told of once, before the logits."""

_SMALLEST = 10
"""A group has no less KV than this part of all layers has of `MIN_TOKENS`, and a layer at least."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """`tell(n)` is called, on the engine's thread, as soon as the KV of the first n layers is
    written (on CUDA: queued to be), for each n of `ends`: ascending, all layers at the end."""

    ends: tuple[int, ...]
    tell: Callable[[int], None]


def group_ends(num_layers: int, num_tokens: int) -> tuple[int, ...]:
    """The `ends` for a step of so many tokens."""
    ends, end = [], 0
    smallest = max(1, num_layers * MIN_TOKENS // (_SMALLEST * max(num_tokens, 1)))
    while num_tokens >= MIN_TOKENS and num_layers - end > smallest:
        end += (num_layers - end + 1) // 2
        ends.append(end)
    return (*ends, num_layers)
