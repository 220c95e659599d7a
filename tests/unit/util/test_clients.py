"""Recipes of clients: what stands in a pickle of a lock. Whole locks are pickled in test_fixed_bugs_process."""

from __future__ import annotations

import pickle

import pytest
import redis
from redis.sentinel import Sentinel

from redislock_fast._util.clients import client_from, recipe_of


def test_recipe_makes_one_client_a_process() -> None:
    recipe = recipe_of(redis.Redis(port=1, db=3, socket_timeout=7))
    first, second = client_from(recipe), client_from(recipe)
    assert first is second
    settings = first.connection_pool.connection_kwargs
    assert (1, 3, 7) == (settings["port"], settings["db"], settings["socket_timeout"])


def test_client_that_is_not_redis_pys_pickles_as_it_likes() -> None:
    client = object()
    assert client_from(recipe_of(client)) is client


def test_other_clients_of_redis_py_are_refused() -> None:
    with pytest.raises(pickle.PicklingError, match="cluster"):
        recipe_of(Sentinel([("localhost", 1)]))  # type: ignore[no-untyped-call]


def test_settings_that_cannot_be_pickled_are_refused() -> None:
    def on_connect() -> None:
        """Local, and so not to be pickled."""

    with pytest.raises(pickle.PicklingError, match="settings"):
        recipe_of(redis.Redis(redis_connect_func=on_connect))
