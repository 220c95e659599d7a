"""`Handle`: a held lock as a value, to be sent to another process.

The clock that leases are measured with means nothing on another machine, so a handle has wall-clock time. A lease that
is read from a handle ends no later than the handle's wall-clock time says, and no later than one ttl from now: so a
receiver whose clock is behind counts on one ttl at most. Unpickling checks the fields as the class does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from redislock_fast._util.times import clock, ttl_ms_of


@dataclass(frozen=True)
class Handle:
    """A held lock, to be sent to another process, which then holds it.

    It can be pickled, and `to_dict` has a form for JSON. Both have the token: any reader of them can release the lock.

    Attributes:
        name: the key, as it was given to the lock.
        token: the lock's token, with which it is released.
        timeout: the lock's ttl in seconds; None or 0: it does not expire.
        expires_at: until when the lease is certainly valid, in seconds of `time.time()`; None where it does not expire
            or the end is not known. The wall clocks of sender and receiver must agree: a receiver whose clock is behind
            may count on the lease for that much longer, by one ttl at most.
        fence: the fencing token, where the lock has one.

    Raises:
        TypeError: for a value of another type.
        ValueError: for a `timeout` that is no ttl, an `expires_at` that is not finite, or a `fence` below 1.
    """

    name: str | bytes
    token: bytes = field(repr=False)
    timeout: float | None
    expires_at: float | None
    fence: int | None = None

    def __post_init__(self) -> None:
        self._check("name", str, bytes)
        self._check("token", bytes)
        self._check("timeout", int, float, type(None))
        self._check("expires_at", int, float, type(None))
        self._check("fence", int, type(None))
        ttl_ms_of(self.timeout)
        if self.expires_at is not None and not math.isfinite(self.expires_at):
            raise ValueError(f"a handle's expires_at must be finite, not {self.expires_at!r}")
        if self.fence is not None and self.fence < 1:
            raise ValueError(f"a handle's fence must be above 0, not {self.fence!r}")

    def _check(self, what: str, *types: type) -> None:
        value = getattr(self, what)
        if not isinstance(value, types) or isinstance(value, bool):
            raise TypeError(f"a handle's {what} must not be of type {type(value).__name__}")

    def __reduce__(self) -> tuple[type[Handle], tuple[Any, ...]]:
        return type(self), astuple(self)  # so that unpickling checks the fields, too

    @classmethod
    def of(
        cls, name: str | bytes, token: bytes, timeout: float | None, lease_end: float | None, fence: int | None = None
    ) -> Handle:
        """A handle of a lock that is held here, as the class makes it.

        `lease_end` is `expires_at` in seconds of the clock that leases are measured with here.
        """
        wall_now = time.time()  # read first: the time until the next line is subtracted
        expires_at = None if lease_end is None else wall_now + (lease_end - clock())
        return cls(name, token, None if timeout is None else float(timeout), expires_at, fence)

    def lease_end(self) -> float | None:
        """Until when the lease is certainly valid, in seconds of the clock that leases are measured with here.

        Returns:
            The earlier one of `expires_at` and one ttl from now; None where the lock does not expire, or the end is not
            known.
        """
        if self.expires_at is None:
            return None
        now = clock()  # read first, as above
        left_s = self.expires_at - time.time()
        return now + (min(left_s, self.timeout) if self.timeout else left_s)

    def to_dict(self) -> dict[str, Any]:
        """The handle as a dict of strings and numbers, for JSON."""
        name = {"name": self.name} if isinstance(self.name, str) else {"name_hex": self.name.hex()}
        return {
            **name,
            "token_hex": self.token.hex(),
            "timeout": self.timeout,
            "expires_at": self.expires_at,
            "fence": self.fence,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Handle:
        """The handle of a dict that `to_dict` has made.

        Raises:
            TypeError: as the class.
            ValueError: as the class, and for a field that is missing.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"{cls.__name__}.from_dict takes the dict of to_dict(), not {type(fields).__name__}")
        try:
            name = bytes.fromhex(fields["name_hex"]) if "name_hex" in fields else fields["name"]
            token = bytes.fromhex(fields["token_hex"])
            return cls(name, token, fields["timeout"], fields["expires_at"], fields["fence"])
        except KeyError as missing:
            raise ValueError(f"a handle needs {missing}") from None
