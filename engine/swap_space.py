"""Host memory for the KV of sequences that gave way: how much there is, and whether it is worth it.

Pure: no tensors, no clock; it is told what copies took. Engine thread only. Life of a `Swap`:

1. `begin` decides. Swapping is cheaper if copying out and back, at the rates measured so far, takes
   less time than computing the tokens again would, by the step-time model. While a rate is unknown
   it is tried, so that it becomes known. A full space, or a model that knows nothing: recompute.
2. The caller has its blocks copied out under a lease that was entered by then, so that they stay in
   flight until the copy ends; then `copied_out`. It may have failed: then the swap is `is_lost`.
3. When the sequence comes back, what the prefix cache lacks is copied in; then `copied_in`.
4. `drop` where it is wanted no more. Memory is given back when no copy uses it: `_settle`; whoever
   copies hears of it by `take_over`.
"""

from engine.kv_lease import KVLease
from engine.request import RequestId
from engine.step_cost import StepCost, StepWork, sequence_work

_NEWEST = 0.3  # what the newest copy counts in a rate


class Swap:
    """KV of the first `num_tokens` of a sequence, on its way to host memory, there or back."""

    __slots__ = ("is_copying", "is_lost", "is_over", "lease", "nbytes", "num_tokens", "request_id")

    def __init__(self, request_id: RequestId, lease: KVLease, num_tokens: int, nbytes: int) -> None:
        self.request_id = request_id
        self.lease = lease
        """On the blocks that it is copied out of; entered."""
        self.num_tokens = num_tokens
        self.nbytes = nbytes
        self.is_copying = True
        self.is_over = False
        """Wanted no more."""
        self.is_lost = False
        """What was copied is not what it should be: compute again."""


class SwapSpace:
    """See the module."""

    def __init__(
        self, cost: StepCost, token_budget: int, capacity_nbytes: int = 0, token_nbytes: int = 1
    ) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.used_nbytes = 0
        self.tokens_out = 0
        """Copied to host memory so far."""
        self.tokens_in = 0
        """Copied back so far."""
        self._cost = cost
        self._token_budget = token_budget
        self._token_nbytes = token_nbytes
        self._out_rate = _CopyRate()
        self._in_rate = _CopyRate()
        self._over: list[Swap] = []

    def begin(self, request_id: RequestId, lease: KVLease, num_tokens: int) -> Swap | None:
        """None: not worth it, or no room. Else the lease is entered."""
        nbytes = num_tokens * self._token_nbytes
        has_room = 0 < nbytes <= self.capacity_nbytes - self.used_nbytes
        if not has_room or not self.is_cheaper(num_tokens):
            return None
        lease.enter()
        self.used_nbytes += nbytes
        return Swap(request_id, lease, num_tokens, nbytes)

    def is_cheaper(self, num_tokens: int) -> bool:
        """To swap so many tokens than to compute them again."""
        if not self._cost.knows_prefill:
            return False
        if self._out_rate.is_unknown or self._in_rate.is_unknown:
            return True
        per_byte = self._out_rate.seconds_per_byte + self._in_rate.seconds_per_byte
        steps = StepWork(steps=-(-num_tokens // self._token_budget))
        recompute_s = self._cost.predict(steps.plus(sequence_work(0, num_tokens)))
        return num_tokens * self._token_nbytes * per_byte < recompute_s

    def copied_out(self, swap: Swap, seconds: float | None) -> None:
        """None: the copy failed."""
        swap.is_lost = seconds is None
        if seconds is not None:
            self._out_rate.learn(swap.nbytes, seconds)
            self.tokens_out += swap.num_tokens
        self._settle(swap)

    def copied_in(self, swap: Swap, num_tokens: int, seconds: float | None) -> None:
        """So many of its last tokens were; None: that failed. The swap is over."""
        if seconds is not None:
            self._in_rate.learn(num_tokens * self._token_nbytes, seconds)
            self.tokens_in += num_tokens
        swap.is_over = True
        self._settle(swap)

    def drop(self, swap: Swap) -> None:
        swap.is_over = True
        if not swap.is_copying:
            self._settle(swap)

    def _settle(self, swap: Swap) -> None:
        """No copy uses it any more."""
        swap.is_copying = False
        if swap.is_over and swap.nbytes:
            self.used_nbytes -= swap.nbytes
            swap.nbytes = 0
            self._over.append(swap)

    def take_over(self) -> list[Swap]:
        """Those whose memory was given back since."""
        over, self._over = self._over, []
        return over


class _CopyRate:
    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self.is_unknown = True

    def learn(self, nbytes: int, seconds: float) -> None:
        newest = 1.0 if self.is_unknown else _NEWEST
        self.seconds_per_byte += newest * (seconds / nbytes - self.seconds_per_byte)
        self.is_unknown = False
