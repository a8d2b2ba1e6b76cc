"""Chooses output tokens from logits, many sequences at a time.

Counter-based: the random numbers of an output token are a pure function of (seed, sample, output
index, token id), so equal seeds give equal tokens however requests are batched, split, preempted
or resumed. A token is drawn as the largest of logits / temperature + Gumbel noise (Gumbel, 1954)
over what min-p, then top-k, then top-p keep, each of what those before it left. Tokens as likely as
the last one kept are kept too, so that a tie never depends on how a sort breaks it. What else may
change the logits (masks, bias, penalties) comes before all that, for greedy rows too:
engine/logit_processors.py.

Why not the inverse of the cumulative distribution: it has a boundary for each token of the
vocabulary. The rounding of a differently split prefill (1e-5 in a logit, 1e-6 in the cumulated
mass) then moved one draw in twenty of a flat distribution to a neighbour; the largest of noisy
logits moves only where the first two are as close as the rounding itself.

No row of a batch depends on another. Nothing here waits for the device. On a CPU the draw goes row
by row and with less work, in numpy (engine/host_sampler.py); what is below is the other devices'.
Beside kernels all of it is theirs (engine/cpu/sampler.py).
"""

from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.host_sampler import draw_tokens
from engine.logit_processors import RowRules, process_logits
from engine.logit_rules import LogitRules, Words
from engine.logprobs import logprob_table
from engine.request import SamplingParams

_UINT64 = (1 << 64) - 1
_FEW = 256  # a top-k worth a selection instead of a sort
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SampleRow(NamedTuple):
    """Whose next token a row of logits is."""

    params: SamplingParams
    sample: int
    output_index: int
    rules: LogitRules | None = None
    """Caught up with the sample's outputs; None if `params` asks for nothing that needs it."""
    grammar: Words | None = None
    """Where a per-row mask of a grammar goes: [ceil(vocab / 32)] int32 on the host, bit i % 32 of
    word i // 32 says that token i may come (xgrammar's layout). It is copied before the call
    returns, so its buffer may be filled again at once. It must allow something."""


class Sampler(Protocol):
    """What a decoder's logits are chosen from by. Engine thread only."""

    def sample_tokens(self, logits: Tensor, rows: Rows[SampleRow]) -> Tensor:
        """As the function below."""
        ...

    def logprob_table(self, logits: Tensor, token_ids: Tensor, *, has_top: bool) -> Tensor:
        """As logprobs.logprob_table."""
        ...


class TorchSampler:
    """A `Sampler` for any device."""

    def sample_tokens(self, logits: Tensor, rows: Rows[SampleRow]) -> Tensor:
        return sample_tokens(logits, rows)

    def logprob_table(self, logits: Tensor, token_ids: Tensor, *, has_top: bool) -> Tensor:
        return logprob_table(logits, token_ids, has_top=has_top)


def sample_tokens(logits: Tensor, rows: Rows[SampleRow]) -> Tensor:
    """logits: [L, vocab] float32, left as it is; -> [L] int64 token ids, on the same device, not
    waited for."""
    if any(row.rules is not None or row.grammar is not None for row in rows):
        logits = process_logits(logits, [RowRules(row.rules, row.grammar) for row in rows])
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if logits.device.type == "cpu":
        return torch.from_numpy(_on_host(logits.numpy(), rows, drawn))  # host memory
    token_ids = logits.argmax(dim=-1)
    if drawn:
        _draw_on_device(logits, drawn, [rows[index] for index in drawn], token_ids)
    return token_ids


def _on_host(
    logits: npt.NDArray[np.float32], rows: Rows[SampleRow], drawn: list[int]
) -> npt.NDArray[np.int64]:
    token_ids: npt.NDArray[np.int64] = np.empty(len(rows), dtype=np.int64)
    if len(drawn) < len(rows):
        for index, row in enumerate(rows):
            if row.params.temperature == 0:
                token_ids[index] = logits[index].argmax()  # thirteen times as fast as torch's
    if drawn:
        sampled = [rows[index] for index in drawn]
        draw_tokens(logits, drawn, [row.params for row in sampled], noise_keys(sampled), token_ids)
    return token_ids


def _draw_on_device(
    logits: Tensor, drawn: list[int], sampled: list[SampleRow], token_ids: Tensor
) -> Tensor:
    """`sampled` are the rows at `drawn`; the others' `token_ids` stand."""
    where, temperature, *keys = _to_device(
        [drawn, [row.params.temperature for row in sampled], *_halves(noise_keys(sampled))],
        logits.device,
    )
    where = where.long()
    scaled = _scale(logits if len(drawn) == len(logits) else logits[where], temperature)
    _filter(scaled, [row.params for row in sampled])
    scaled += gumbel_noise(torch.stack(keys).int(), scaled.shape[1])
    return token_ids.index_copy_(0, where, scaled.argmax(dim=-1))


def noise_keys(rows: Rows[SampleRow]) -> npt.NDArray[np.uint64]:
    """[len(rows)], 64 bits each: the splitmix64 finalizer (Steele, Lea and Flood, 2014) absorbs
    seed, sample and output index one after the other."""
    state = np.zeros(len(rows), dtype=np.uint64)
    for column in noise_counters(rows).T:
        state = _mix((state ^ column) + _GOLDEN)
    return state


def noise_counters(rows: Rows[SampleRow]) -> npt.NDArray[np.uint64]:
    """[len(rows), 3]: seed, sample, output index."""
    counters = [(row.params.seed & _UINT64, row.sample, row.output_index) for row in rows]
    return np.array(counters, dtype=np.uint64).reshape(-1, 3)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """keys [2, R] int32 → [R, vocab_size] float32: a 32-bit hash of key and token id gives 31 bits
    of a uniform number u, and -log(-log(1 - u)) is the noise. u is fine where the noise is large,
    for only large noise wins."""
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = _mix32(_mix32(token_ids ^ keys[0].unsqueeze(1)) ^ keys[1].unsqueeze(1))
    u = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return u.neg_().log1p_().neg_().log_().neg_()


def _mix32(x: Tensor) -> Tensor:
    """In place, [...] int32: Wellons' low-bias 32-bit finalizer; wraps as unsigned would."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # a logical shift
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _halves(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """[R] of 64 bits → [2, R] of 32"""
    return np.ascontiguousarray(keys.view(np.int32).reshape(-1, 2).T)


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


def _scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """[R, vocab]. The maximum goes first: a tiny temperature must not overflow the others."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted.div_(temperature.float().unsqueeze(1))


def _filter(scaled: Tensor, params: Rows[SamplingParams]) -> None:
    """Sets to -inf, in place, what min-p, top-k and top-p take away; [R, vocab], maxima are 0."""
    if any(p.min_p > 0 for p in params):
        (least,) = _to_device([_log_min_p(params)], scaled.device)
        scaled.masked_fill_(scaled < least.float().unsqueeze(1), -torch.inf)
    few = [i for i, p in enumerate(params) if 0 < p.top_k <= _FEW]
    if few:
        _filter_rows(scaled, few, params, max(params[i].top_k for i in few))
    vocab_size = scaled.shape[1]
    many = [i for i, p in enumerate(params) if not 0 < p.top_k <= _FEW]
    many = [i for i in many if 0 < params[i].top_k < vocab_size or params[i].top_p < 1.0]
    if many:
        _filter_rows(scaled, many, params, vocab_size)


def _log_min_p(params: Rows[SamplingParams]) -> npt.NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.log([p.min_p for p in params], dtype=np.float64)


def _filter_rows(
    scaled: Tensor, rows: list[int], params: Rows[SamplingParams], num_sorted: int
) -> None:
    """`num_sorted` bounds their top-k. What lies below a row's own top-k adds exact zeros, so the
    result does not depend on it."""
    num_sorted = min(num_sorted, scaled.shape[1])
    num_cut = [num_sorted - min(params[i].top_k or num_sorted, num_sorted) for i in rows]
    where, first_kept, top_p = _to_device(
        [rows, num_cut, [params[i].top_p for i in rows]], scaled.device
    )
    where = where.long()
    chosen = scaled[where]
    probs = chosen.softmax(dim=-1)
    ascending = _largest(probs, num_sorted)
    kth = ascending.gather(1, first_kept.long().unsqueeze(1))
    # Of those as likely as the last of the top k, some may not have been sorted: they count too.
    num_unsorted = (probs >= kth).sum(dim=-1, keepdim=True) - (ascending >= kth).sum(
        dim=-1, keepdim=True
    )
    mass = ascending.masked_fill_(ascending < kth, 0.0).cumsum(dim=-1, dtype=torch.float64)
    mass += num_unsorted * kth
    # The least likely token kept: up to it, ascending, there is more mass than may be dropped.
    droppable = mass[:, -1:] * (1.0 - top_p.unsqueeze(1))
    index = torch.searchsorted(mass, droppable, right=True).clamp_(max=num_sorted - 1)
    least = ascending.gather(1, index)
    scaled.index_copy_(0, where, chosen.masked_fill_(probs < least, -torch.inf))


def _largest(rows: Tensor, count: int) -> Tensor:
    """[R, count] the largest of each row, ascending."""
    if count <= _FEW:
        return rows.topk(count, dim=-1).values.flip(-1)
    return rows.sort(dim=-1).values
