"""Whose requests they are, and what a key allows. Facts only."""

from dataclasses import dataclass, field

from router.objective import NO_WISH, Wish


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who shares the workers with others."""

    name: str
    priority: int = 0
    """Lower goes first."""
    weight: float = 1.0
    """Its share among tenants of its priority."""


@dataclass(frozen=True, slots=True)
class Limits:
    """0: none."""

    requests_per_min: int = 0
    tokens_per_min: int = 0
    concurrent: int = 0


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Grant:
    """What a key stands for."""

    tenant: Tenant
    limits: Limits = NO_LIMITS
    wish: Wish = NO_WISH
    is_operator: bool = False
    """May see what all tenants do."""
    digest: bytes = field(default=b"", repr=False)
    """Of the key; empty: of whoever comes while there are no keys."""


EVERYBODY = Grant(Tenant("default"), is_operator=True)
