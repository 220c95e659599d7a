"""What users may override in a lock: redis-py's scripts and `do_*` methods."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

from redislock_fast._protocol import scripts

__all__ = ["EXTEND", "REACQUIRE", "RELEASE", "Hooks", "hooks_of", "script_object"]


class _LuaScript:
    """A script with the call of redis-py's `Script`, but without a reference to a client."""

    def __init__(self, text: str) -> None:
        self.script = text
        self.sha = ""

    def __call__(self, keys: Any, args: Any, client: Any) -> Any:
        script = client.register_script(self.script)
        self.sha = script.sha
        return script(keys=keys, args=args, client=client)


def script_object(text: str, ours: _LuaScript) -> _LuaScript:
    return ours if text is ours.script else _LuaScript(text)


RELEASE = _LuaScript(scripts.RELEASE.text.decode())

EXTEND = _LuaScript(scripts.EXTEND.text.decode())

REACQUIRE = _LuaScript(scripts.REACQUIRE.text.decode())


class Hooks(NamedTuple):
    """The attributes of a lock that a class or an object may override, as `redis.lock.Lock` has them."""

    lua_release: Any
    lua_extend: Any
    lua_reacquire: Any
    do_acquire: Any
    do_release: Any
    do_extend: Any
    do_reacquire: Any

    @classmethod
    def of(cls, lock_class: Any) -> Hooks:
        """The hooks of a class of this library, which override nothing."""
        do = (lock_class.do_acquire, lock_class.do_release, lock_class.do_extend, lock_class.do_reacquire)
        return cls(RELEASE, EXTEND, REACQUIRE, *do)


hooks_of = attrgetter(*(f"{name}.__func__" if name.startswith("do_") else name for name in Hooks._fields))
