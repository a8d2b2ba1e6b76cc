"""Cuts a range of tokens into frames that fit a slot. Pure.

A frame carries all layers of whole receiver blocks where that fits, so that it scatters as whole
blocks. Where one block of all layers is too large, layers are split; where even one layer of one
block is, so are its tokens. The pieces of one cut are equal to within one unit, for a slot that is
nearly full beside one that is nearly empty gains nothing and evens out no load.
"""

from collections.abc import Iterator

from kvfabric.frame import FrameRange
from kvfabric.ticket import KVShape


def max_frame_tokens(shape: KVShape, max_nbytes: int) -> int:
    """Tokens of a single layer that fit one frame. Zero: this KV cannot be framed at all."""
    return max_nbytes // shape.frame_nbytes(FrameRange(0, 1, 0, 1, 0, shape.num_heads))


def plan_frames(
    first_token: int,
    end_token: int,
    *,
    shape: KVShape,
    block_size: int,
    max_nbytes: int,
    layers: range | None = None,
) -> list[FrameRange]:
    """Frames that cover tokens [first_token, end_token) of `layers` (all, by default) and of all
    heads of `shape` exactly once.

    `block_size` is the receiver's: cuts between frames lie on multiples of it, as far as a slot
    of `max_nbytes` payload bytes allows.
    """
    line_tokens = max_frame_tokens(shape, max_nbytes)
    assert line_tokens > 0, f"one token of one layer of {shape} exceeds {max_nbytes} bytes"
    layers = range(shape.num_layers) if layers is None else layers
    frames = []
    for first, end in _token_runs(first_token, end_token, block_size, line_tokens, len(layers)):
        most = min(len(layers), line_tokens // (end - first))
        for layer, layer_end in _even_cuts(layers.start, layers.stop, most):
            tokens, num_layers = end - first, layer_end - layer
            heads = shape.first_head, shape.num_heads
            frames.append(FrameRange(first, tokens, layer, num_layers, *heads))
    return frames


def _token_runs(
    first_token: int, end_token: int, block_size: int, line_tokens: int, num_layers: int
) -> Iterator[tuple[int, int]]:
    """Token ranges of frames: several blocks, one block, or pieces of one block."""
    blocks_per_frame = line_tokens // num_layers // block_size
    first_block, end_block = first_token // block_size, -(-end_token // block_size)
    for block, block_end in _even_cuts(first_block, end_block, max(blocks_per_frame, 1)):
        first = max(first_token, block * block_size)
        end = min(end_token, block_end * block_size)
        yield from _even_cuts(first, end, line_tokens)


def _even_cuts(first: int, end: int, largest: int) -> Iterator[tuple[int, int]]:
    """[first, end) in as few pieces of at most `largest` as possible, equal to within one."""
    pieces = -(-(end - first) // largest)
    for i in range(pieces):
        yield (
            first + (end - first) * i // pieces,
            first + (end - first) * (i + 1) // pieces,
        )
