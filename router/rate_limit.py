"""What each key may still take: requests and tokens of a minute, requests at once. Pure.

A bucket holds a minute's worth and fills evenly. What a request will write is not known when it
comes: it takes what is expected, and gives back or owes the rest when it has ended. A debt is
waited out. One that asks for more than a bucket holds passes when the bucket is full.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from router.tenant import Grant, Limits

MINUTE_S = 60.0
BUSY_S = 1.0
"""When to come back, if nobody can know: one of as many as are allowed at once has to end."""

Reason = Literal["requests_per_min", "tokens_per_min", "concurrent"]
Header = tuple[bytes, bytes]


class Refusal(NamedTuple):
    reason: Reason
    limit: int
    retry_after_s: float


@dataclass(slots=True)
class Bucket:
    """`size` a minute. Times are of one clock."""

    size: int
    now_s: float
    balance: float = 0.0

    def __post_init__(self) -> None:
        self.balance = float(self.size)

    def flow(self, now_s: float) -> None:
        filled = self.balance + self.size * max(0.0, now_s - self.now_s) / MINUTE_S
        self.balance = min(float(self.size), filled)
        self.now_s = max(self.now_s, now_s)

    def wait_s(self, cost: float) -> float:
        """Until so much may be taken."""
        lacking = min(cost, self.size) - self.balance
        return max(0.0, lacking) * MINUTE_S / self.size

    @property
    def full_in_s(self) -> float:
        return (self.size - self.balance) * MINUTE_S / self.size

    def resize(self, size: int) -> None:
        """What was taken stays taken."""
        self.balance += size - self.size
        self.size = size


class _Account:
    """Of one key."""

    def __init__(self, limits: Limits, now_s: float) -> None:
        self.num_running = 0
        self.requests = Bucket(limits.requests_per_min, now_s)
        self.tokens = Bucket(limits.tokens_per_min, now_s)

    def update(self, limits: Limits, now_s: float) -> None:
        pairs = (self.requests, limits.requests_per_min), (self.tokens, limits.tokens_per_min)
        for bucket, size in pairs:
            if bucket.size != size:
                bucket.resize(size)
            if size:
                bucket.flow(now_s)


class RateLimits:
    """See the module."""

    def __init__(self) -> None:
        self._accounts: dict[bytes, _Account] = {}

    def begin(self, grant: Grant, now_s: float) -> Refusal | None:
        """A request has come; unless it is refused, `end` must follow."""
        account, limits = self._account(grant, now_s), grant.limits
        if limits.concurrent and account.num_running >= limits.concurrent:
            return Refusal("concurrent", limits.concurrent, BUSY_S)
        if limits.requests_per_min:
            if wait_s := account.requests.wait_s(1):
                return Refusal("requests_per_min", limits.requests_per_min, wait_s)
            account.requests.balance -= 1
        account.num_running += 1
        return None

    def end(self, grant: Grant) -> None:
        self._accounts[grant.digest].num_running -= 1

    def take_tokens(self, grant: Grant, cost: float, now_s: float) -> Refusal | None:
        """Unless it is refused, `settle` must follow."""
        account = self._account(grant, now_s)
        if grant.limits.tokens_per_min:
            if wait_s := account.tokens.wait_s(cost):
                return Refusal("tokens_per_min", grant.limits.tokens_per_min, wait_s)
            account.tokens.balance -= cost
        return None

    def settle(self, grant: Grant, taken: float, used: float, now_s: float) -> None:
        """Of what was taken before, so much was used; it may be more."""
        account = self._account(grant, now_s)
        if account.tokens.size:
            account.tokens.balance = min(
                float(account.tokens.size), account.tokens.balance + taken - used
            )

    def keep(self, grants: Iterable[Grant]) -> None:
        """Keys other than these are no more; those with requests that run are kept until later."""
        known = {grant.digest for grant in grants}
        self._accounts = {
            digest: account
            for digest, account in self._accounts.items()
            if digest in known or account.num_running
        }

    def headers(self, grant: Grant, now_s: float) -> list[Header]:
        """As OpenAI names them; of limits that are none, none."""
        account = self._account(grant, now_s)
        told: list[Header] = []
        for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket.size:
                remaining = max(0, math.floor(bucket.balance))
                for word, value in (
                    ("limit", str(bucket.size)),
                    ("remaining", str(remaining)),
                    ("reset", duration(bucket.full_in_s)),
                ):
                    told.append((f"x-ratelimit-{word}-{name}".encode(), value.encode()))
        return told

    def _account(self, grant: Grant, now_s: float) -> _Account:
        account = self._accounts.get(grant.digest)
        if account is None:
            account = self._accounts[grant.digest] = _Account(grant.limits, now_s)
        account.update(grant.limits, now_s)
        return account


def duration(seconds: float) -> str:
    """As OpenAI writes it: 17ms, 8.64s, 6m0s, 1h2m3s."""
    ms = math.ceil(max(0.0, seconds) * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if minutes or hours:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text
