"""Frames: the self-describing unit that crosses the network. (skeleton; to be completed)"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrameRange:
    """Which part of a request's KV a frame carries: half-open ranges by first and count."""

    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
