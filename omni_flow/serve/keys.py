"""API keys: who may call, how much, and which salt keeps one caller's cached data from another's. Pure.

Only SHA-256 digests are kept: keys are random and long, so a digest gives nothing away.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "OMNI_FLOW_API_KEYS"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class KeysError(ValueError):
    """A line of a keys file, or the environment variable, that can't be understood."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(
            f"{place}: {why}; a line is NAME SHA256 [rate=N] [concurrency=N], as `omni-flow key NAME` makes it"
        )


@dataclass(frozen=True, slots=True)
class Key:
    """One caller. None: the server's own limits."""

    name: str
    digest: str
    rate: float | None = None
    concurrency: int | None = None

    @property
    def salt(self) -> str:
        """Set by the server, never by the caller: part of the identity of what this caller has cached.

        Empty where there are no keys, and so only one caller.
        """
        if not self.digest:
            return ""
        return hashlib.sha256(f"omni-flow tenant {self.name} {self.digest}".encode()).hexdigest()[:32]


def digest_of(secret: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(secret.encode()).hexdigest()


def make_key(name: str) -> tuple[str, str]:
    """A fresh secret, shown once, and its line for the keys file. Raises KeysError for a name that can't be one."""
    if _NAME.fullmatch(name) is None:
        raise KeysError(name, "a name is letters, digits, and _ . -")
    secret = f"of-{secrets.token_urlsafe(32)}"
    return secret, f"{name} {digest_of(secret)}"


def parse(lines: Iterable[str], place: str) -> list[Key]:
    """The keys of a file's lines. Raises KeysError naming the line."""
    found: dict[str, Key] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{place}:{number}"
        if len(words) < 2 or _NAME.fullmatch(words[0]) is None or _DIGEST.fullmatch(words[1]) is None:
            raise KeysError(where, "no key")
        if words[0] in found:
            raise KeysError(where, f"the name {words[0]!r} stands there twice")
        found[words[0]] = Key(words[0], words[1], *_limits(words[2:], where))
    return list(found.values())


def _limits(words: list[str], where: str) -> tuple[float | None, int | None]:
    made: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in ("rate", "concurrency") or not value.replace(".", "", 1).isdigit() or float(value) <= 0:
            raise KeysError(where, f"{word!r} is no limit")
        made[name] = float(value)
    return made.get("rate"), int(made["concurrency"]) if "concurrency" in made else None


def load(path: Path | None, environment: Mapping[str, str]) -> list[Key]:
    """The keys of a file, and of the environment: entries `NAME:SECRET` or secrets alone, between commas.

    Raises: KeysError, also for a name that stands there twice; OSError.
    """
    keys = parse(path.read_text().splitlines(), str(path)) if path is not None else []
    for number, entry in enumerate(e.strip() for e in environment.get(ENVIRONMENT, "").split(",")):
        if entry:
            name, colon, secret = entry.partition(":")
            if not colon:
                name, secret = f"key-{number}", entry
            if _NAME.fullmatch(name) is None:
                raise KeysError(ENVIRONMENT, f"{name!r} is no name")
            if name in {key.name for key in keys}:
                raise KeysError(ENVIRONMENT, f"the name {name!r} stands there twice")
            keys.append(Key(name, digest_of(secret)))
    return keys


class Keys:
    """Finds the caller of a secret. Without any key everybody is the caller `anonymous`."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = {key.digest: key for key in keys}
        self.needed = bool(self._keys)
        self.anonymous = Key("anonymous", "")

    def find(self, secret: str) -> Key | None:
        """The caller, in a time that says nothing about how near a wrong secret is."""
        digest = digest_of(secret)
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None


class Limiter:
    """A token bucket and a count of live requests for one caller."""

    __slots__ = ("_at", "_tokens", "burst", "concurrency", "live", "rate")

    def __init__(self, rate: float | None, burst: int, concurrency: int | None) -> None:
        self.rate, self.burst, self.concurrency = rate, max(1, burst), concurrency
        self.live = 0
        self._tokens = float(self.burst)
        self._at = 0.0

    def enter(self, now: float) -> tuple[str, float] | None:
        """Take part in the limits until `leave`; or (why not, seconds to wait)."""
        if self.concurrency is not None and self.live >= self.concurrency:
            return f"{self.live} requests of this key are live, the limit is {self.concurrency}", 1.0
        if self.rate is not None:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
            self._at = now
            if self._tokens < 1.0:
                return f"this key may send {self.rate:g} requests a second", (1.0 - self._tokens) / self.rate
            self._tokens -= 1.0
        self.live += 1
        return None

    def leave(self) -> None:
        """The request is over."""
        self.live -= 1
