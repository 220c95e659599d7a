"""`lock.local`, as redis-py's locks have it. Other projects compare `local.token` with the lock's value, or set it.

Thread safety: that of the owners. An object of this class is made for each use.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from redislock_fast._lease.owner import Owner
from redislock_fast._util.tokens import CONTENDED_FLAG, without_flag

__all__ = ["Local", "owners_of"]


class Local(SimpleNamespace):
    """The caller's token, in the form in which the lock's value has it. All other attributes are the owners'.

    Args:
        owners: of the lock.
        encode: makes bytes of what is assigned: a token, or the lock's value.
    """

    __repr__ = object.__repr__  # a SimpleNamespace would show the token

    def __init__(self, owners: Any, encode: Callable[[Any], bytes]) -> None:
        vars(self).update(_owners=owners, _encode=encode)

    @property
    def token(self) -> Any:
        """The caller's token, and behind it the contended flag where the lock's value is known to have it."""
        owner: Owner = self._owners.held()
        token = owner.token
        return token + CONTENDED_FLAG if token is not None and owner.is_contended(token) else token

    @token.setter
    def token(self, value: Any) -> None:
        owner: Owner = self._owners.taken()
        encoded = b"" if value is None else self._encode(value)
        token = without_flag(encoded)
        if token != encoded:
            owner.token = owner.contended = token
        else:
            owner.token = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owners, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "token":
            super().__setattr__(name, value)
        else:
            setattr(self._owners, name, value)


def owners_of(local: Any) -> Any:
    """The owners that a lock gets where a caller assigns `lock.local`: perhaps those of another lock."""
    return vars(local)["_owners"] if isinstance(local, Local) else local
