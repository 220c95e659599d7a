"""The operations, driven by hand: the requests that each sends to each server, and its result for each reply.

No server, no clock, no chance. Each test feeds replies as hiredis parses them.
"""

from __future__ import annotations

import hiredis
import pytest

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.capabilities import PROBE, Capabilities, ending
from redislock_fast._protocol.commands import Acquire, Extend, Reacquire, ReadHolder, Release
from redislock_fast._protocol.operation import Operation, Refused
from redislock_fast._protocol.scripts import EXTEND, REACQUIRE, RELEASE
from tests.simulation.keyspace import Entry
from tests.simulation.model import SERVERS, WRONGTYPE, Model

KEY = b"name"
TOKEN = b"token"

NOPERM = hiredis.ReplyError("NOPERM User u has no permissions to run the command")
NOSCRIPT = hiredis.ReplyError("NOSCRIPT No matching script. Please use EVAL.")
SYNTAX_ERROR = hiredis.ReplyError("ERR syntax error")
UNKNOWN_COMMAND = hiredis.ReplyError("ERR unknown command 'X', with args beginning with: ")

OTHER_WORDS = [
    *("ERR syntax error near 'IFEQ'", "ERR wrong number of arguments for 'set' command", "ERR command is disabled"),
    *("ERR unsupported", "DENIED by the proxy", "error"),
]

REFUSALS = pytest.mark.parametrize(
    "refusal", [NOPERM, SYNTAX_ERROR, UNKNOWN_COMMAND, *map(hiredis.ReplyError, OTHER_WORDS)], ids=str
)


def capabilities_of(server: str) -> Capabilities:
    return Capabilities(Model(SERVERS[server]).execute(PROBE))


def operations() -> list[Operation]:
    return [
        Acquire(KEY, TOKEN, 1000),
        Release(KEY, TOKEN, None),
        Reacquire(KEY, TOKEN, 1000),
        Extend(KEY, TOKEN, 1000, False, 60.0),
        ReadHolder(KEY),
    ]


# ---- what the server understands ----


def test_capabilities_of_each_server() -> None:
    capabilities_list = {name: capabilities_of(name) for name in SERVERS}
    assert {
        name: (capabilities.set_get, capabilities.release, capabilities.set_ifeq)
        for name, capabilities in capabilities_list.items()
    } == {
        "Valkey 9": (True, b"DELIFEQ", True),
        "Redis 8.4": (True, b"DELEX", True),
        "Redis 7.0": (True, None, False),
        "Redis 6.2": (False, None, False),
    }


@pytest.mark.parametrize("reply", [None, NOPERM, b"OK", [], [None], {}, [None, None, None, None]], ids=repr)
def test_dialect_is_plain_where_the_probe_is_refused_or_answered_oddly(reply: Reply) -> None:
    capabilities = Capabilities(reply)
    assert (capabilities.set_get, capabilities.release, capabilities.set_ifeq) == (False, None, False)


@pytest.mark.parametrize(
    ("server", "hello", "push", "sharded"),
    [
        ("Redis 7.0", {b"mode": b"standalone", b"proto": 3}, True, False),
        ("Redis 6.2", {b"mode": b"standalone", b"proto": 3}, True, False),
        ("Redis 7.0", {b"mode": b"cluster", b"proto": 3}, True, True),
        ("Redis 6.2", {b"mode": b"cluster", b"proto": 3}, False, True),  # it has no sharded channels
        ("Redis 7.0", UNKNOWN_COMMAND, False, False),
        ("Redis 7.0", NOPERM, False, False),
        ("Redis 7.0", None, False, False),
    ],
    ids=["single", "single 6.2", "cluster", "cluster 6.2", "unknown", "forbidden", "not asked"],
)
def test_messages_can_be_pushed_where_hello_is_answered(server: str, hello: Reply, push: bool, sharded: bool) -> None:
    capabilities = Capabilities(Model(SERVERS[server]).execute(PROBE), hello)
    assert (push, sharded) == (capabilities.push, capabilities.sharded)


# ---- ending a connection ----


@pytest.mark.parametrize("name", [b"", b"a=b"])
def test_a_connection_is_ended_by_number_and_address(name: bytes) -> None:
    info = b"id=7 addr=127.0.0.1:51406 laddr=127.0.0.1:6379 fd=10 name=%b age=0 cmd=client|info user=default\n" % name
    assert ending(info) == (b"CLIENT", b"KILL", b"ID", b"7", b"ADDR", b"127.0.0.1:51406")


@pytest.mark.parametrize("reply", [NOPERM, UNKNOWN_COMMAND, b"id=7 name=", b"anything"], ids=str)
def test_a_connection_that_is_not_described_cannot_be_ended(reply: Reply) -> None:
    assert ending(reply) is None


# ---- acquire ----


@pytest.mark.parametrize("ttl_ms", [None, 1500])
@pytest.mark.parametrize("server", SERVERS)
def test_acquire_request(server: str, ttl_ms: int | None) -> None:
    expiry: Args = () if ttl_ms is None else (b"PX", ttl_ms)
    get: Args = () if server == "Redis 6.2" else (b"GET",)
    request = Acquire(KEY, TOKEN, ttl_ms).request(capabilities_of(server), 1.0)
    assert (b"SET", KEY, TOKEN, b"NX", *expiry, *get) == request


def test_acquire_takes_the_free_lock() -> None:
    for server, free in (("Valkey 9", None), ("Redis 6.2", b"OK")):
        capabilities = capabilities_of(server)
        acquire = Acquire(KEY, TOKEN, 1000)
        acquire.request(capabilities, 5.0)
        assert acquire.feed(free, capabilities)
        assert (acquire.result, acquire.unsettled, acquire.sent_at) == (True, False, 5.0)


def test_acquire_names_the_holder() -> None:
    capabilities = capabilities_of("Valkey 9")
    acquire = Acquire(KEY, TOKEN, 1000)
    acquire.request(capabilities, 5.0)
    assert acquire.feed(b"OK", capabilities)
    assert (acquire.result, acquire.holder) == (False, b"OK")


def test_acquire_looks_for_the_holder_where_set_does_not_tell() -> None:
    capabilities = capabilities_of("Redis 6.2")
    acquire = Acquire(KEY, TOKEN, 1000)
    acquire.request(capabilities, 5.0)
    assert not acquire.feed(None, capabilities)
    assert acquire.request(capabilities, 5.0) == (b"GET", KEY)
    assert acquire.feed(b"OK", capabilities)
    assert (acquire.result, acquire.holder) == (False, b"OK")


@REFUSALS
def test_acquire_is_content_without_the_holder_where_get_is_denied(refusal: hiredis.ReplyError) -> None:
    capabilities = capabilities_of("Redis 6.2")
    acquire = Acquire(KEY, TOKEN, 1000)
    acquire.request(capabilities, 5.0)
    acquire.feed(None, capabilities)
    assert acquire.feed(refusal, capabilities)
    assert (acquire.result, acquire.holder) == (False, None)


def test_acquire_does_not_guess_after_a_loss_where_get_is_denied() -> None:
    capabilities = capabilities_of("Redis 6.2")
    acquire = Acquire(KEY, TOKEN, 1000)
    acquire.request(capabilities, 5.0)
    acquire.note_unanswered(True)
    acquire.request(capabilities, 6.0)
    acquire.feed(None, capabilities)
    with pytest.raises(Refused, match="NOPERM"):
        acquire.feed(NOPERM, capabilities)
    assert acquire.unsettled


@pytest.mark.parametrize("server", ["Valkey 9", "Redis 6.2"])
def test_acquire_finds_its_own_token_after_a_lost_reply(server: str) -> None:
    model = Model(SERVERS[server])
    capabilities = capabilities_of(server)
    acquire = Acquire(KEY, TOKEN, 1000)
    model.execute(acquire.request(capabilities, 5.0))
    acquire.note_unanswered(True)
    while not acquire.feed(model.execute(acquire.request(capabilities, 6.0)), capabilities):
        pass
    assert acquire.result
    assert acquire.sent_at == 5.0


def test_acquire_does_not_take_an_equal_token_that_it_did_not_set() -> None:
    capabilities = capabilities_of("Valkey 9")
    acquire = Acquire(KEY, TOKEN, 1000)
    acquire.request(capabilities, 5.0)
    acquire.note_unanswered(False)
    acquire.request(capabilities, 6.0)
    assert acquire.feed(TOKEN, capabilities)
    assert (acquire.result, acquire.unsettled) == (False, False)


@pytest.mark.parametrize("reply", [b"OK", None], ids=repr)
@REFUSALS
def test_acquire_goes_on_without_set_get_where_it_is_refused(refusal: hiredis.ReplyError, reply: Reply) -> None:
    capabilities = capabilities_of("Redis 7.0")
    acquire = Acquire(KEY, TOKEN, 1000)
    acquire.request(capabilities, 5.0)
    assert not acquire.feed(refusal, capabilities)
    assert acquire.request(capabilities, 5.0) == (b"SET", KEY, TOKEN, b"NX", b"PX", 1000)
    assert capabilities.set_get  # until the other form has been executed
    acquire.feed(reply, capabilities)
    assert not capabilities.set_get


@pytest.mark.parametrize("text", [WRONGTYPE, "OOM no memory", "MISCONF no disk"])
def test_acquire_tries_no_other_form_where_no_set_would_do(text: str) -> None:
    capabilities = capabilities_of("Redis 7.0")
    acquire = Acquire(KEY, TOKEN, 1000)
    acquire.request(capabilities, 5.0)
    with pytest.raises(Refused):
        acquire.feed(hiredis.ReplyError(text), capabilities)
    assert capabilities.set_get


@REFUSALS
def test_form_is_kept_for_others_where_the_next_one_is_refused_as_well(refusal: hiredis.ReplyError) -> None:
    for operation in (Acquire(KEY, TOKEN, 1000), Release(KEY, TOKEN, None), Reacquire(KEY, TOKEN, 1000)):
        capabilities = capabilities_of("Valkey 9")
        before = operation.request(capabilities, 5.0)
        assert not operation.feed(refusal, capabilities)
        assert before != operation.request(capabilities, 5.0)
        with pytest.raises(Refused):
            operation.feed(refusal, capabilities)
        assert (capabilities.set_get, capabilities.set_ifeq, capabilities.release) == (True, True, b"DELIFEQ")


@REFUSALS
def test_acquire_is_refused_where_plain_set_is(refusal: hiredis.ReplyError) -> None:
    capabilities = capabilities_of("Redis 6.2")
    acquire = Acquire(KEY, TOKEN, 1000)
    acquire.request(capabilities, 5.0)
    with pytest.raises(Refused):
        acquire.feed(refusal, capabilities)
    assert not acquire.unsettled


def test_acquire_understands_its_reply_though_a_neighbour_lowered_the_dialect_meanwhile() -> None:
    capabilities = capabilities_of("Redis 7.0")
    acquire = Acquire(KEY, TOKEN, 1000)
    acquire.request(capabilities, 5.0)
    capabilities.set_get = False  # another caller's SET ... GET was refused, for a key that its user may not read
    assert acquire.feed(None, capabilities)
    assert acquire.result


def test_operations_try_the_next_form_though_a_neighbour_was_refused_first() -> None:
    for operation in (Acquire(KEY, TOKEN, 1000), Release(KEY, TOKEN, None), Reacquire(KEY, TOKEN, 1000)):
        capabilities = capabilities_of("Valkey 9")
        refused = operation.request(capabilities, 5.0)
        capabilities.set_get = capabilities.set_ifeq = False
        capabilities.release = None
        assert not operation.feed(NOPERM, capabilities)
        assert refused != operation.request(capabilities, 5.0)


# ---- release ----


@pytest.mark.parametrize(
    ("server", "request_"),
    [
        ("Valkey 9", (b"DELIFEQ", KEY, TOKEN)),
        ("Redis 8.4", (b"DELEX", KEY, b"IFEQ", TOKEN)),
        ("Redis 7.0", (b"EVALSHA", RELEASE.sha, 1, KEY, TOKEN, b"1")),
        ("Redis 6.2", (b"EVALSHA", RELEASE.sha, 1, KEY, TOKEN, b"1")),
    ],
)
def test_release_request(server: str, request_: Args) -> None:
    assert request_ == Release(KEY, TOKEN, None).request(capabilities_of(server), 1.0)


@pytest.mark.parametrize(("reply", "result"), [(1, True), (0, False)])
def test_release_result(reply: int, result: bool) -> None:
    capabilities = capabilities_of("Valkey 9")
    release = Release(KEY, TOKEN, 10.0)
    release.request(capabilities, 5.0)
    assert release.feed(reply, capabilities)
    assert result is release.result


@pytest.mark.parametrize(
    ("sent", "left_at", "expires_at", "result"),
    [(True, 5.0, 10.0, True), (True, 5.0, None, True), (True, 10.5, 10.0, False), (False, 5.0, 10.0, False)],
    ids=["within the lease", "without a ttl", "after the lease", "never sent"],
)
def test_release_that_finds_nothing_after_a_loss(
    sent: bool, left_at: float, expires_at: float | None, result: bool
) -> None:
    capabilities = capabilities_of("Valkey 9")
    release = Release(KEY, TOKEN, expires_at)
    release.request(capabilities, left_at)
    release.note_unanswered(sent)
    release.request(capabilities, 11.0)
    assert release.feed(0, capabilities)
    assert result is release.result


def test_release_goes_on_from_an_unsettled_one() -> None:
    capabilities = capabilities_of("Valkey 9")
    release = Release(KEY, TOKEN, 10.0, unsettled=True)
    release.request(capabilities, 11.0)
    assert release.feed(0, capabilities)
    assert release.result


@pytest.mark.parametrize("server", ["Valkey 9", "Redis 8.4"])
@REFUSALS
def test_release_goes_on_with_the_script_where_the_native_command_is_refused(
    server: str, refusal: hiredis.ReplyError
) -> None:
    capabilities = capabilities_of(server)
    native = capabilities.release
    release = Release(KEY, TOKEN, None)
    release.request(capabilities, 5.0)
    assert not release.feed(refusal, capabilities)
    assert (b"EVALSHA", RELEASE.sha, 1, KEY, TOKEN, b"1") == release.request(capabilities, 5.0)
    assert native == capabilities.release  # until the script has been executed
    assert not release.feed(NOSCRIPT, capabilities)
    assert (b"EVAL", RELEASE.text, 1, KEY, TOKEN, b"1") == release.request(capabilities, 5.0)
    assert release.feed(1, capabilities)
    assert (release.result, capabilities.release) == (True, None)


# ---- reacquire ----


@pytest.mark.parametrize("server", SERVERS)
def test_reacquire_request(server: str) -> None:
    script: Args = (b"EVALSHA", REACQUIRE.sha, 1, KEY, TOKEN, 1500)
    native: Args = (b"SET", KEY, TOKEN, b"IFEQ", TOKEN, b"PX", 1500)
    expected = native if server in ("Valkey 9", "Redis 8.4") else script
    assert expected == Reacquire(KEY, TOKEN, 1500).request(capabilities_of(server), 1.0)


@pytest.mark.parametrize("server", SERVERS)
def test_reacquire_without_a_ttl_takes_the_old_one_away(server: str) -> None:
    model = Model(SERVERS[server])
    capabilities = capabilities_of(server)
    model.put(KEY, TOKEN, 1000)
    reacquire = Reacquire(KEY, TOKEN, None)
    while not reacquire.feed(model.execute(reacquire.request(capabilities, 1.0)), capabilities):
        pass
    assert reacquire.result
    assert model.entry(KEY) == Entry(TOKEN)


@pytest.mark.parametrize(
    ("server", "reply", "result"),
    [("Valkey 9", b"OK", True), ("Valkey 9", None, False), ("Redis 7.0", 1, True), ("Redis 7.0", 0, False)],
)
def test_reacquire_result(server: str, reply: Reply, result: bool) -> None:
    capabilities = capabilities_of(server)
    reacquire = Reacquire(KEY, TOKEN, 1500)
    reacquire.request(capabilities, 5.0)
    assert reacquire.feed(reply, capabilities)
    assert (result, 5.0) == (reacquire.result, reacquire.sent_at)


@REFUSALS
def test_reacquire_goes_on_with_the_script_where_set_ifeq_is_refused(refusal: hiredis.ReplyError) -> None:
    capabilities = capabilities_of("Valkey 9")
    reacquire = Reacquire(KEY, TOKEN, 1500)
    reacquire.request(capabilities, 5.0)
    assert not reacquire.feed(refusal, capabilities)
    assert (b"EVALSHA", REACQUIRE.sha, 1, KEY, TOKEN, 1500) == reacquire.request(capabilities, 5.0)
    assert reacquire.feed(1, capabilities)
    assert (reacquire.result, capabilities.set_ifeq) == (True, False)


def test_reacquire_goes_on_with_the_script_where_set_finds_no_memory() -> None:
    capabilities = capabilities_of("Valkey 9")
    reacquire = Reacquire(KEY, TOKEN, 1500)
    reacquire.request(capabilities, 5.0)
    assert not reacquire.feed(
        hiredis.ReplyError("OOM command not allowed when used memory > 'maxmemory'."), capabilities
    )
    assert (b"EVALSHA", REACQUIRE.sha, 1, KEY, TOKEN, 1500) == reacquire.request(capabilities, 5.0)
    assert reacquire.feed(1, capabilities)
    assert reacquire.result
    assert capabilities.set_ifeq  # for the next lease, when there may be memory


# ---- extend ----


@pytest.mark.parametrize(("replace", "flag"), [(False, b"0"), (True, b"1")])
def test_extend_request(replace: bool, flag: bytes) -> None:
    for server in SERVERS:
        request = Extend(KEY, TOKEN, 1500, replace, 10.0).request(capabilities_of(server), 1.0)
        assert (b"EVALSHA", EXTEND.sha, 1, KEY, TOKEN, 1500, flag) == request


def test_extend_caps_what_it_sends_again() -> None:
    capabilities = capabilities_of("Redis 7.0")
    extend = Extend(KEY, TOKEN, 1500, False, 10.0)
    extend.request(capabilities, 5.0)
    extend.note_unanswered(True)
    assert (b"EVALSHA", EXTEND.sha, 1, KEY, TOKEN, 1500, b"0", 5500) == extend.request(capabilities, 6.0)
    assert extend.feed(1, capabilities)
    assert (extend.result, extend.expires_at) == (True, 11.5)


def test_extend_caps_at_one_addition_even_after_the_old_lease_has_ended() -> None:
    capabilities = capabilities_of("Redis 7.0")
    extend = Extend(KEY, TOKEN, 5000, False, 10.0)
    extend.request(capabilities, 9.0)
    extend.note_unanswered(True)
    assert (b"EVALSHA", EXTEND.sha, 1, KEY, TOKEN, 5000, b"0", 3000) == extend.request(capabilities, 12.0)


def test_extend_that_replaces_needs_no_cap() -> None:
    capabilities = capabilities_of("Redis 7.0")
    extend = Extend(KEY, TOKEN, 1500, True, 10.0)
    first = extend.request(capabilities, 5.0)
    extend.note_unanswered(True)
    assert first == extend.request(capabilities, 6.0)
    assert extend.feed(1, capabilities)
    assert extend.expires_at == 7.5


def test_extend_asks_for_a_ttl_that_it_does_not_know() -> None:
    capabilities = capabilities_of("Redis 7.0")
    extend = Extend(KEY, TOKEN, 1500, False, None)
    assert extend.request(capabilities, 5.0) == (b"PTTL", KEY)
    assert not extend.feed(2000, capabilities)
    assert (b"EVALSHA", EXTEND.sha, 1, KEY, TOKEN, 1500, b"0") == extend.request(capabilities, 5.5)
    extend.note_unanswered(True)
    assert (b"EVALSHA", EXTEND.sha, 1, KEY, TOKEN, 1500, b"0", 2500) == extend.request(capabilities, 6.0)


@pytest.mark.parametrize("reply", [-1, -2], ids=["without a ttl", "gone"])
def test_extend_of_what_has_no_ttl_is_not_owned(reply: int) -> None:
    capabilities = capabilities_of("Redis 7.0")
    extend = Extend(KEY, TOKEN, 1500, False, None)
    extend.request(capabilities, 5.0)
    assert extend.feed(reply, capabilities)
    assert not extend.result


@pytest.mark.parametrize(("replace", "ttl_ms"), [(False, 3500), (True, 1500)])
def test_extend_computes_the_ttl_itself_where_scripts_are_denied(replace: bool, ttl_ms: int) -> None:
    model = Model(SERVERS["Valkey 9"], frozenset({"EVAL", "EVALSHA"}))
    model.put(KEY, TOKEN, 2000)
    capabilities = Capabilities(model.execute(PROBE))
    extend = Extend(KEY, TOKEN, 1500, replace, 2.0)
    sent = []
    finished = False
    while not finished:
        sent.append(extend.request(capabilities, 0.0))
        finished = extend.feed(model.execute(sent[-1]), capabilities)
    assert [request[0] for request in sent] == [b"EVALSHA", b"GET", b"PTTL", b"SET"]
    assert (b"SET", KEY, TOKEN, b"IFEQ", TOKEN, b"PX", ttl_ms) == sent[-1]
    assert (True, ttl_ms / 1000) == (extend.result, extend.expires_at)


@REFUSALS
def test_extend_goes_on_without_the_script_where_it_is_refused(refusal: hiredis.ReplyError) -> None:
    capabilities = capabilities_of("Valkey 9")
    extend = Extend(KEY, TOKEN, 1500, False, 10.0)
    extend.request(capabilities, 5.0)
    assert not extend.feed(refusal, capabilities)
    assert extend.request(capabilities, 5.0) == (b"GET", KEY)
    with pytest.raises(Refused):
        extend.feed(refusal, capabilities)


def test_extend_is_refused_where_neither_scripts_nor_set_ifeq_are_there() -> None:
    capabilities = capabilities_of("Redis 7.0")
    extend = Extend(KEY, TOKEN, 1500, False, 10.0)
    extend.request(capabilities, 5.0)
    with pytest.raises(Refused, match="NOPERM"):
        extend.feed(NOPERM, capabilities)


def test_extend_by_nothing_of_a_lease_at_its_end_sends_a_ttl_that_servers_take() -> None:
    capabilities = capabilities_of("Valkey 9")
    extend = Extend(KEY, TOKEN, 0, False, 10.0)
    for now, reply in ((9.9, NOPERM), (9.9, TOKEN), (10.0, 0)):
        extend.request(capabilities, now)
        assert not extend.feed(reply, capabilities)
    ttl_ms = extend.request(capabilities, 10.1)[-1]
    assert isinstance(ttl_ms, int)
    assert ttl_ms > 0


# ---- look ----


@pytest.mark.parametrize(
    ("reply", "result", "holder"),
    [(None, False, None), (b"", True, b""), (TOKEN, True, TOKEN), (hiredis.ReplyError(WRONGTYPE), True, None)],
    ids=repr,
)
def test_look(reply: Reply, result: bool, holder: bytes | None) -> None:
    look = ReadHolder(KEY)
    assert look.request(Capabilities(), 1.0) == (b"GET", KEY)
    assert look.feed(reply, Capabilities())
    assert (result, holder) == (look.result, look.holder)


def test_capabilities_that_are_taken_away_stay_away() -> None:
    capabilities = Capabilities([[b"delifeq"], None, [b"lmpop"]])
    assert Release(KEY, TOKEN, None).request(capabilities, 0.0)[0] == b"DELIFEQ"
    capabilities.release = None
    assert Release(KEY, TOKEN, None).request(capabilities, 0.0)[0] == b"EVALSHA"
    assert Acquire(KEY, TOKEN, None).request(capabilities, 0.0)[-1] == b"GET"
