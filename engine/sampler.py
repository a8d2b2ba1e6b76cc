"""Chooses output tokens from logits, many sequences at a time.

Counter-based: the random number of an output token is a pure function of (seed, sample, output
index), so equal seeds give equal tokens however requests are batched, split, preempted or
resumed. A sampled token is the inverse, at that number, of the cumulative distribution over the
vocabulary in token order: softmax(logits / temperature) in float32, without what top-k and then
top-p (over what top-k left) take away. Tokens as likely as the last one kept are kept too, so that
a tie never depends on how a sort breaks it.

No row of a batch depends on another. Nothing here waits for the device.
"""

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.request import SamplingParams

_UINT64 = (1 << 64) - 1
_FEW = 256  # a top-k worth a selection instead of a sort
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SampleRow(NamedTuple):
    """Whose next token a row of logits is."""

    params: SamplingParams
    sample: int
    output_index: int


def sample_tokens(logits: Tensor, rows: Rows[SampleRow]) -> Tensor:
    """logits: [L, vocab] float32; -> [L] int64 token ids, on the same device, not waited for."""
    token_ids = logits.argmax(dim=-1)
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if not drawn:
        return token_ids
    sampled = [rows[index] for index in drawn]
    where, temperature, number = _to_device(
        [drawn, [row.params.temperature for row in sampled], uniforms(sampled)], logits.device
    )
    where = where.long()
    probs = _softmax(logits if len(drawn) == len(rows) else logits[where], temperature)
    _filter(probs, [row.params for row in sampled])
    return token_ids.index_copy_(0, where, _invert(probs, number))


def uniforms(rows: Rows[SampleRow]) -> npt.NDArray[np.float64]:
    """[len(rows)] in [0, 1), 53 bits each: the splitmix64 finalizer (Steele, Lea and Flood, 2014)
    absorbs seed, sample and output index one after the other."""
    counters = np.array(
        [(row.params.seed & _UINT64, row.sample, row.output_index) for row in rows],
        dtype=np.uint64,
    )
    state = np.zeros(len(rows), dtype=np.uint64)
    for column in counters.T:
        state = _mix((state ^ column) + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _to_device(columns: Rows[npt.ArrayLike], device: torch.device) -> Tensor:
    """[len(columns), rows] float64, by one copy."""
    host = torch.from_numpy(np.array(columns, dtype=np.float64))
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """[R, vocab]. The maximum goes first: a tiny temperature must not overflow the others."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted.div_(temperature.float().unsqueeze(1)).softmax(dim=-1)


def _filter(probs: Tensor, params: Rows[SamplingParams]) -> None:
    """Zeroes, in place, what top-k and top-p take away; [R, vocab], not renormalised."""
    few = [i for i, p in enumerate(params) if 0 < p.top_k <= _FEW]
    if few:
        _filter_rows(probs, few, params, max(params[i].top_k for i in few))
    vocab_size = probs.shape[1]
    many = [i for i, p in enumerate(params) if _FEW < p.top_k < vocab_size]
    many += [i for i, p in enumerate(params) if p.top_k == 0 and p.top_p < 1.0]
    if many:
        _filter_rows(probs, many, params, vocab_size)


def _filter_rows(
    probs: Tensor, rows: list[int], params: Rows[SamplingParams], num_sorted: int
) -> None:
    """`num_sorted` bounds their top-k. What lies below a row's own top-k adds exact zeros, so the
    result does not depend on it."""
    num_sorted = min(num_sorted, probs.shape[1])
    num_cut = [num_sorted - min(params[i].top_k or num_sorted, num_sorted) for i in rows]
    where, first_kept, top_p = _to_device(
        [rows, num_cut, [params[i].top_p for i in rows]], probs.device
    )
    where = where.long()
    chosen = probs[where]
    ascending = _largest(chosen, num_sorted)
    kth = ascending.gather(1, first_kept.long().unsqueeze(1))
    mass = ascending.masked_fill_(ascending < kth, 0.0).cumsum(dim=-1, dtype=torch.float64)
    # The least likely token kept: up to it, ascending, there is more mass than may be dropped.
    droppable = mass[:, -1:] * (1.0 - top_p.unsqueeze(1))
    index = torch.searchsorted(mass, droppable, right=True).clamp_(max=num_sorted - 1)
    least = ascending.gather(1, index)
    probs.index_copy_(0, where, chosen.masked_fill_(chosen < least, 0.0))


def _largest(rows: Tensor, count: int) -> Tensor:
    """[R, count] the largest of each row, ascending."""
    if count <= _FEW:
        return rows.topk(count, dim=-1).values.flip(-1)
    if rows.device.type == "cpu":  # numpy's sort, without indices, is four times faster there
        return torch.from_numpy(np.sort(rows.numpy(), axis=-1))  # host memory
    return rows.sort(dim=-1).values


def _invert(probs: Tensor, number: Tensor) -> Tensor:
    """[R] the token at which the cumulative distribution passes `number`; [R] in [0, 1)."""
    mass = probs.cumsum(dim=-1, dtype=torch.float64)
    total = mass[:, -1:]
    # At most just below the whole, so that the token found has mass whatever the rounding.
    target = torch.minimum(number.unsqueeze(1) * total, torch.nextafter(total, total - 1))
    return torch.searchsorted(mass, target, right=True).squeeze(1)
