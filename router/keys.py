"""API keys: what a line of the key file says, and whose a key is. Pure.

A line is `sha256:HEX tenant=NAME [WORD=NUMBER ...]`; what is behind a `#` is for people. Keys
themselves are nowhere: a key is 256 random bits, so that its plain SHA-256 cannot be guessed back.
What is wrong is told by source and number of the line, never by what stands there: it may be a key.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence

from router.objective import Wish
from router.tenant import Grant, Limits, Tenant

PREFIX = "baton-"
_SCHEME = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_NEAR = 4
"""Bytes of a digest by which it is looked up before it is compared."""

_COUNT, _REAL = r"[0-9]{1,12}", r"[0-9]{1,7}(\.[0-9]{1,6})?"
WORDS = {
    "requests_per_min": _COUNT,
    "tokens_per_min": _COUNT,
    "concurrent": _COUNT,
    "priority": r"-?[0-9]{1,2}",
    "weight": _REAL,
    "slo_ttft_ms": _REAL,
    "slo_tpot_ms": _REAL,
    "operator": "[01]",
}
"""What a line may say beside its tenant, and how such a number looks."""
MAX_PRIORITY = 10
WEIGHTS = (0.01, 100.0)


class BadKeys(Exception):
    """The key file cannot be understood."""


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def line_of(key: str, tenant: str, words: Sequence[str]) -> str:
    """For the file. Raises BadKeys if it would not be understood there."""
    line = " ".join([_SCHEME + digest_of(key).hex(), f"tenant={tenant}", *words])
    if any(char in line for char in "#;\r\n") or len(line.split()) != 2 + len(words):
        raise BadKeys("no word may hold spaces, ';' or '#'")
    _grant(line.split(), "the line")
    return line


class KeyRing:
    """All keys of a router."""

    def __init__(self, grants: Iterable[Grant] = ()) -> None:
        """Raises BadKeys if two do not fit together."""
        self.grants = tuple(grants)
        self._near: dict[bytes, list[Grant]] = {}
        tenants: dict[str, Tenant] = {}
        for grant in self.grants:
            name = grant.tenant.name
            if tenants.setdefault(name, grant.tenant) != grant.tenant:
                raise BadKeys(f"keys of tenant {name} differ in its priority or weight")
            near = self._near.setdefault(grant.digest[:_NEAR], [])
            if any(one.digest == grant.digest for one in near):
                raise BadKeys(f"a key of tenant {name} stands there twice")
            near.append(grant)

    def find(self, key: str) -> Grant | None:
        """Whose it is. Takes as long for a wrong key as for a right one, wherever they differ."""
        digest, found = digest_of(key), None
        for grant in self._near.get(digest[:_NEAR], ()):
            if hmac.compare_digest(grant.digest, digest):
                found = grant
        return found


def parse(*sources: tuple[str, str]) -> KeyRing:
    """Of (name, text) each. Raises BadKeys."""
    grants = []
    for source, text in sources:
        for number, line in enumerate(text.splitlines(), start=1):
            if words := line.partition("#")[0].split():
                grants.append(_grant(words, f"{source}, line {number}"))
    return KeyRing(grants)


def _grant(words: Sequence[str], where: str) -> Grant:
    if not _DIGEST.fullmatch(words[0]):
        raise BadKeys(f"{where}: must begin with sha256: and 64 hex digits, as `baton keys` prints")
    told: dict[str, str] = {}
    for index, word in enumerate(words[1:], start=2):
        name, _, value = word.partition("=")
        if name != "tenant" and name not in WORDS:
            known = ", ".join(["tenant", *WORDS])
            raise BadKeys(f"{where}: word {index} is no NAME=VALUE of {known}")
        if name in told:
            raise BadKeys(f"{where}: {name} stands there twice")
        if not (_NAME.fullmatch(value) if name == "tenant" else _fits(WORDS[name], value)):
            raise BadKeys(f"{where}: {name} has no such value")
        told[name] = value
    if "tenant" not in told:
        raise BadKeys(f"{where}: no tenant is named")
    counts = {name: int(told.get(name, 0)) for name in Limits.__dataclass_fields__}
    priority, weight = int(told.get("priority", 0)), float(told.get("weight", 1))
    if abs(priority) > MAX_PRIORITY:
        raise BadKeys(f"{where}: priority is -{MAX_PRIORITY} to {MAX_PRIORITY}")
    if not WEIGHTS[0] <= weight <= WEIGHTS[1]:
        raise BadKeys(f"{where}: weight is {WEIGHTS[0]:g} to {WEIGHTS[1]:g}")
    ttft, tpot = (told.get(name) for name in ("slo_ttft_ms", "slo_tpot_ms"))
    wish = Wish(None if ttft is None else float(ttft), None if tpot is None else float(tpot))
    digest = bytes.fromhex(words[0].removeprefix(_SCHEME))
    return Grant(
        Tenant(told["tenant"], priority, weight),
        Limits(**counts),
        wish,
        is_operator=told.get("operator") == "1",
        digest=digest,
    )


def _fits(pattern: str, value: str) -> bool:
    return re.fullmatch(pattern, value, re.ASCII) is not None
