"""Acquiring by the caller's own token: driven by hand, and on real servers.

Rules: the first part feeds replies of the model, or as hiredis parses them, as `test_commands.py` does; the second part
drives the operation over the transport.
"""

from __future__ import annotations

import hiredis
import pytest
import redis
from redis.exceptions import ResponseError

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.capabilities import PROBE, Capabilities
from redislock_fast._protocol.claims import has_taken
from redislock_fast._protocol.commands import Acquire
from redislock_fast._protocol.operation import NotExecuted, Redirected, Refused
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._transport.threads.driver import transport_of
from redislock_fast._util.times import clock
from redislock_fast._util.tokens import CONTENDED_FLAG
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.simulation.keyspace import Entry
from tests.simulation.model import SERVERS, WRONGTYPE, Model
from tests.support.helpers import EXTEND_COMMANDS
from tests.support.proxy import Proxy

KEY = b"name"
TOKEN = b"job-17"
OURS = b"rlf:" + b"1" * 32
VALUES = pytest.mark.parametrize(
    ("token", "value"), [(TOKEN, TOKEN), (OURS, OURS), (OURS, OURS + CONTENDED_FLAG)], ids=["brought", "ours", "marked"]
)
TTLS_MS = pytest.mark.parametrize("ttl_ms", [None, 60_000])
EACH_SERVER = pytest.mark.parametrize("server", SERVERS)

NOPERM = hiredis.ReplyError("NOPERM User u has no permissions to run the command")


class _Driven:
    """An operation whose requests are sent one at a time, one second after another."""

    def __init__(self, server: str, token: bytes = TOKEN, ttl_ms: int | None = 60_000) -> None:
        self.model = Model(SERVERS[server])
        self.capabilities = Capabilities(self.model.execute(PROBE))
        self.operation = AcquireOwn(KEY, token, ttl_ms)
        self.now = 4.0

    def send(self) -> Reply:
        """Let the server execute the next request. Returns its reply."""
        self.now += 1.0
        self.model.now_ms = int(self.now * 1000)
        return self.model.execute(self.operation.request(self.capabilities, self.now))

    def step(self) -> bool:
        """Send the next request and feed its reply."""
        return self.operation.feed(self.send(), self.capabilities)

    def step_until_found(self) -> None:
        """Go on until the next request is the reacquire."""
        finished = self.step()
        if not self.capabilities.set_get:
            finished = self.step()
        assert not finished

    def forbid_to_reacquire(self) -> None:
        """From now on, the server refuses every form of it."""
        self.model._nobody.denied = frozenset({"SET IFEQ", "EVAL", "EVALSHA"})

    def finish(self) -> None:
        """Go on to the end."""
        while not self.step():
            pass


# ---- driven by hand ----


@TTLS_MS
@EACH_SERVER
def test_free_lock_is_taken_as_any_other(server: str, ttl_ms: int | None) -> None:
    driven = _Driven(server, ttl_ms=ttl_ms)
    assert driven.operation.request(driven.capabilities, 1.0) == Acquire(KEY, TOKEN, ttl_ms).request(
        driven.capabilities, 1.0
    )
    assert driven.step()
    assert (driven.operation.result, driven.operation.holder, driven.operation.sent_at) == (True, None, 1.0)
    assert driven.model.entry(KEY) == Entry(TOKEN, None if ttl_ms is None else 5000 + ttl_ms)


@VALUES
@TTLS_MS
@EACH_SERVER
def test_lock_that_is_held_with_the_token_has_its_lease_anew(
    server: str, ttl_ms: int | None, token: bytes, value: bytes
) -> None:
    driven = _Driven(server, token, ttl_ms)
    driven.model.put(KEY, value, 30_000)
    driven.step_until_found()
    found_at = driven.now
    driven.finish()
    assert driven.operation.result
    assert driven.operation.sent_at == found_at + 1.0
    assert driven.model.entry(KEY) == Entry(value, None if ttl_ms is None else int(driven.now * 1000) + ttl_ms)


@pytest.mark.parametrize(("value", "token"), [(b"job+", b"job"), (b"job", b"job+"), (OURS, TOKEN)], ids=str)
@pytest.mark.parametrize("lost", [False, True], ids=["", "after a loss"])
@EACH_SERVER
def test_token_of_another_is_not_taken_for_a_marked_one(server: str, lost: bool, value: bytes, token: bytes) -> None:
    driven = _Driven(server, token)
    driven.model.put(KEY, value, 30_000)
    if lost:
        driven.send()
        driven.operation.note_unanswered(True)
    driven.finish()
    assert (driven.operation.result, driven.operation.holder) == (False, value)
    assert driven.model.entry(KEY) == Entry(value, 30_000)


@EACH_SERVER
def test_lease_after_a_lost_reply_counts_from_the_reacquire(server: str) -> None:
    driven = _Driven(server)
    driven.send()
    driven.operation.note_unanswered(True)
    driven.step_until_found()
    found_at = driven.now
    driven.finish()
    assert (driven.operation.result, driven.operation.sent_at) == (True, found_at + 1.0)


@EACH_SERVER
def test_lock_that_ends_before_its_reacquire_is_taken(server: str) -> None:
    driven = _Driven(server)
    driven.model.put(KEY, TOKEN, 30_000)
    driven.step_until_found()
    driven.model.remove(KEY)
    driven.finish()
    assert (driven.operation.result, driven.operation.holder, driven.operation.sent_at) == (True, None, 5.0)
    assert driven.model.entry(KEY) == Entry(TOKEN, int(driven.now * 1000) + 60_000)


@EACH_SERVER
def test_lock_that_ends_before_each_reacquire_is_given_up(server: str) -> None:
    driven = _Driven(server)
    for _ in range(3):
        driven.model.put(KEY, TOKEN, 30_000)
        driven.step_until_found()
        driven.model.remove(KEY)
        while driven.operation._renewal is not None:
            finished = driven.step()
    assert finished
    assert (driven.operation.result, driven.operation.holder) == (False, None)


@EACH_SERVER
def test_reacquire_of_unknown_outcome_leaves_the_earlier_lock_alone(server: str) -> None:
    driven = _Driven(server)
    driven.model.put(KEY, TOKEN, 30_000)
    driven.step_until_found()
    driven.send()
    driven.operation.note_unanswered(True)
    assert driven.operation.to_clean_up(failed=True) == []


def test_look_of_unknown_outcome_leaves_the_earlier_lock_alone() -> None:
    driven = _Driven("Redis 6.2")
    driven.model.put(KEY, TOKEN, 30_000)
    assert not driven.step()
    driven.send()
    driven.operation.note_unanswered(True)
    assert driven.operation.to_clean_up(failed=True) == []


@EACH_SERVER
def test_set_of_unknown_outcome_leaves_the_earlier_lock_alone(server: str) -> None:
    driven = _Driven(server)
    driven.model.put(KEY, TOKEN, 30_000)
    driven.send()
    driven.operation.note_unanswered(True)
    driven.step_until_found()
    assert driven.operation.to_clean_up(failed=True) == []


@EACH_SERVER
def test_attempt_took_what_was_free_and_not_what_it_found(server: str) -> None:
    free, found = _Driven(server), _Driven(server)
    found.model.put(KEY, TOKEN, 30_000)
    for driven in (free, found):
        driven.finish()
        assert driven.operation.result
    assert (free.operation.took, found.operation.took) == (True, False)


@EACH_SERVER
def test_reply_says_whether_its_request_took_the_key(server: str) -> None:
    driven = _Driven(server)
    request = driven.operation.request(driven.capabilities, driven.now)
    assert has_taken(request, driven.model.execute(request))
    assert not has_taken(request, driven.model.execute(request))
    assert not has_taken(request, NOPERM)
    reacquire: Args = (b"SET", KEY, TOKEN, b"IFEQ", TOKEN, b"PX", 60_000)
    for reply in (b"OK", None):
        assert not has_taken(reacquire, reply)


@EACH_SERVER
def test_lock_that_may_not_be_reacquired_counts_as_anothers(server: str) -> None:
    driven = _Driven(server)
    driven.model.put(KEY, TOKEN, 30_000)
    driven.step_until_found()
    driven.forbid_to_reacquire()
    driven.finish()
    assert (driven.operation.result, driven.operation.holder) == (False, TOKEN)
    assert driven.model.entry(KEY) == Entry(TOKEN, 30_000)


@EACH_SERVER
def test_lock_that_may_be_its_own_and_may_not_be_reacquired_is_an_error(server: str) -> None:
    driven = _Driven(server)
    driven.send()
    driven.operation.note_unanswered(True)
    driven.step_until_found()
    driven.forbid_to_reacquire()
    with pytest.raises(Refused, match="NOPERM"):
        driven.finish()
    assert driven.operation.to_clean_up(failed=True) == []


def test_lock_that_may_not_be_read_counts_as_anothers() -> None:
    driven = _Driven("Redis 6.2")
    driven.model.put(KEY, TOKEN, 30_000)
    assert not driven.step()
    assert driven.operation.feed(NOPERM, driven.capabilities)
    assert (driven.operation.result, driven.operation.holder) == (False, None)


@EACH_SERVER
def test_errors_that_mean_later_or_elsewhere_repeat_the_reacquire(server: str) -> None:
    driven = _Driven(server)
    driven.model.put(KEY, TOKEN, 30_000)
    driven.step_until_found()
    before = driven.operation.request(driven.capabilities, driven.now)
    for text, error in (("LOADING Redis is loading", NotExecuted), ("MOVED 5798 127.0.0.1:7001", Redirected)):
        with pytest.raises(error):
            driven.operation.feed(hiredis.ReplyError(text), driven.capabilities)
        assert before == driven.operation.request(driven.capabilities, driven.now)


def test_what_is_no_string_any_more_is_refused() -> None:
    driven = _Driven("Valkey 9")
    driven.model.put(KEY, TOKEN, 30_000)
    driven.step_until_found()
    driven.model.put(KEY, None)
    with pytest.raises(Refused, match=WRONGTYPE):
        driven.finish()


@EACH_SERVER
def test_no_plain_reply_means_anothers(server: str) -> None:
    driven = _Driven(server)
    driven.operation.request(driven.capabilities, 1.0)
    assert driven.operation.plain_replies() == (b"OK" if server == "Redis 6.2" else None, None)


# ---- on real servers ----


def acquire(client: redis.Redis, token: bytes = TOKEN, ttl_ms: int | None = 60_000) -> AcquireOwn:
    """The operation, driven to its end."""
    operation = AcquireOwn(KEY, token, ttl_ms)
    transport_of(client).execute(operation)
    return operation


@VALUES
@TTLS_MS
def test_found_lock_has_its_lease_anew(client: redis.Redis, token: bytes, value: bytes, ttl_ms: int | None) -> None:
    client.set(KEY, value, px=30_000)
    before = clock()
    operation = acquire(client, token, ttl_ms)
    assert operation.result
    assert before <= operation.sent_at <= clock()
    left_ms = client.pttl(KEY)
    assert left_ms == -1 if ttl_ms is None else 30_000 < left_ms <= ttl_ms
    assert client.get(KEY) == value


def test_key_that_is_no_string_is_an_error(client: redis.Redis) -> None:
    client.rpush(KEY, "item")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        acquire(client)


@pytest.mark.parametrize("nth", [1, 2], ids=["of the set", "of the reacquire"])
def test_lost_reply(proxy: Proxy, connect: Connect, nth: int) -> None:
    client = connect(proxy.port)
    client.set(KEY, TOKEN, px=30_000)
    proxy.drop_reply(*EXTEND_COMMANDS, nth=nth)
    operation = acquire(client)
    assert proxy.dropped.is_set()
    assert operation.result
    assert 30_000 < client.pttl(KEY) <= 60_000


@pytest.mark.parametrize("rules", [("-delifeq",), ("-eval", "-evalsha"), ("-get",)], ids=str)
def test_found_lock_where_valkey_does_not_allow_everything(
    valkey: Server, connect: Connect, acl_user: MakeUser, rules: tuple[str, ...]
) -> None:
    client = connect(valkey.port, **acl_user(valkey, *rules).options())
    assert all(acquire(client).result for _ in range(2))


@pytest.mark.parametrize("rules", [("-eval", "-evalsha"), ("-get",)], ids=str)
def test_found_lock_where_scripts_can_do_nothing_counts_as_anothers(
    scripts_only: Server, connect: Connect, acl_user: MakeUser, rules: tuple[str, ...]
) -> None:
    client = connect(scripts_only.port, **acl_user(scripts_only, *rules).options())
    assert [acquire(client).result for _ in range(2)] == [True, False]
