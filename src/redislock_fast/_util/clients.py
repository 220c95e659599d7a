"""Pickling a lock's client: redis-py's own clients hold locks and sockets and cannot be pickled.

A recipe holds the settings of the client's pool. Rules: a recipe never holds a credential, so a client that has any is
refused; and a process makes one client of a recipe, however many locks come with it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import redis
import redis.asyncio

__all__ = ["client_from", "recipe_of"]

_CREDENTIALS = ("username", "password", "credential_provider", "ssl_password")
# Made anew by every pool; they hold locks or point back at the pool.
_OF_THE_POOL = {
    "event_dispatcher",
    "himport_registry",
    "maint_notifications_pool_handler",
    "oss_cluster_maint_notifications_handler",
}

# One client a recipe. Both under the lock.
_clients: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # a finalizer may enter again


def recipe_of(client: Any) -> Any:
    """What `client_from` makes an equal client of in another process.

    Returns:
        The pickled settings; the client itself where it is not one of redis-py's and pickles as it likes.

    Raises:
        pickle.PicklingError: the client has credentials, which do not belong in a pickle, or is a cluster client.
    """
    import pickle  # noqa: PLC0415  # a third of the package's import time, and few pickle locks

    if not type(client).__module__.startswith("redis."):
        return client
    if not isinstance(client, (redis.Redis, redis.asyncio.Redis)):
        raise pickle.PicklingError("a cluster client cannot be pickled: make the lock anew in the other process")
    pool = client.connection_pool
    settings = {
        name: value
        for name, value in pool.connection_kwargs.items()
        # redis-py marks "not given" with a bare object(), which is another one after unpickling.
        if name not in _OF_THE_POOL and type(value) is not object
    }
    if any(settings.get(name) is not None for name in _CREDENTIALS):
        raise pickle.PicklingError(
            "the client has credentials, which do not belong in a pickle: make the lock anew in the other process"
        )
    try:
        return pickle.dumps((type(client), type(pool), pool.connection_class, settings))
    except Exception as error:
        raise pickle.PicklingError(f"the client's settings cannot be pickled: {error}") from error


def client_from(recipe: Any) -> Any:
    """The client of a recipe; the same one for the same recipe while it lives."""
    import pickle  # noqa: PLC0415  # as above

    if not isinstance(recipe, bytes):
        return recipe
    with _lock:
        client = _clients.get(recipe)
        if client is None:
            client_class, pool_class, connection_class, settings = pickle.loads(recipe)  # noqa: S301  # inside a pickle
            pool = pool_class(connection_class=connection_class, **settings)
            client = _clients[recipe] = client_class(connection_pool=pool)
        return client
