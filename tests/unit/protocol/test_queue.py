"""The operations of a waiter, driven by hand: what they send, and what they make of each reply.

Rules: no server but the model, no clock, no chance; replies are as hiredis parses them.
"""

from __future__ import annotations

import hiredis
import pytest

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.capabilities import HELLO, PROBE, Capabilities
from redislock_fast._protocol.keys import queue_keys
from redislock_fast._protocol.operation import NotExecuted, Operation, Redirected
from redislock_fast._protocol.queue import JoinQueue, LeaveQueue, Subscribe, Watch, cleanup_requests
from redislock_fast._protocol.scripts import LEAVE, RELEASE, WAIT
from tests.simulation.keyspace import Entry
from tests.simulation.model import SERVERS, WRONGTYPE, Model

KEY = b"name"
TOKEN = b"rlf:" + b"1" * 32
HOLDER = b"rlf:" + b"2" * 32
THIRD = b"rlf:" + b"3" * 32
CHANNEL = b"rlf:ours"

NOPERM = hiredis.ReplyError("NOPERM User u has no permissions to run the command")
NOSCRIPT = hiredis.ReplyError("NOSCRIPT No matching script. Please use EVAL.")
UNKNOWN_COMMAND = hiredis.ReplyError("ERR unknown command 'X', with args beginning with: ")
OOM = hiredis.ReplyError("OOM command not allowed when used memory > 'maxmemory'. script: 12, on @user_script:90.")
DENIALS = pytest.mark.parametrize("denial", [NOPERM, UNKNOWN_COMMAND, OOM], ids=str)


def server() -> tuple[Model, Capabilities]:
    """A model and what a connection to it understands."""
    model = Model(SERVERS["Valkey 9"])
    return model, Capabilities(model.execute(PROBE), model.execute(HELLO))


def wait(ttl_ms: int | None = 1000, look_for: bytes = b"", token: bytes = TOKEN) -> JoinQueue:
    return JoinQueue(KEY, token, ttl_ms or 0, b"publish", CHANNEL, 5000, 60_000, look_for)


def drive(operation: Operation, model: Model, capabilities: Capabilities, now: float = 1.0) -> None:
    """Give it the model's replies until it is finished."""
    while True:
        request = operation.request(capabilities, now)
        reply = [model.execute(each) for each in request] if operation.is_pipeline else model.execute(request)
        if operation.feed(reply, capabilities):
            return


def waiting(model: Model) -> list[bytes]:
    """The tokens in the queue."""
    entry = model.entry(queue_keys(KEY)[0])
    return [] if entry is None else sorted(entry.items, key=entry.items.__getitem__)


# ---- wait ----


@pytest.mark.parametrize(("ttl_ms", "value"), [(1500, 1500), (None, 0)])
def test_wait_request(ttl_ms: int | None, value: int) -> None:
    request = wait(ttl_ms, HOLDER).request(Capabilities(), 1.0)
    words = (value, b"publish", CHANNEL, 5000, 60_000, HOLDER)
    assert (b"EVALSHA", WAIT.sha, 3, KEY, *queue_keys(KEY), TOKEN, *words) == request


def test_wait_is_sent_whole_once_the_server_does_not_know_it() -> None:
    operation = wait()
    by_hash = operation.request(Capabilities(), 1.0)
    assert not operation.feed(NOSCRIPT, Capabilities())
    assert (b"EVAL", WAIT.text, *by_hash[2:]) == operation.request(Capabilities(), 2.0)
    assert not operation.denied
    assert operation.sent_at == 2.0


def test_wait_takes_the_free_lock() -> None:
    model, capabilities = server()
    operation = wait(1500)
    drive(operation, model, capabilities)
    assert (operation.result, operation.value) == (True, TOKEN + b"+")
    assert model.entry(KEY) == Entry(TOKEN + b"+", 1500)
    assert waiting(model) == []


def test_wait_marks_the_holders_lock_and_stands_in_the_queue() -> None:
    model, capabilities = server()
    model.put(KEY, HOLDER, 700)
    operation = wait()
    drive(operation, model, capabilities)
    assert (operation.result, operation.foreign, operation.value) == (False, False, HOLDER + b"+")
    assert operation.left_ms == 700
    assert model.entry(KEY) == Entry(HOLDER + b"+", 700)
    assert waiting(model) == [TOKEN]


def test_wait_repeated_keeps_the_place() -> None:
    model, capabilities = server()
    model.put(KEY, HOLDER)
    arrivals = []
    for token in (TOKEN, THIRD, TOKEN):
        operation = wait(token=token)
        model.now_us += 1000
        drive(operation, model, capabilities)
        arrivals.append(operation.arrival)
    assert waiting(model) == [TOKEN, THIRD]
    assert arrivals == [1000, 2000, 0]
    assert operation.left_ms == -1


@pytest.mark.parametrize(("look_for", "is_there"), [(b"", True), (THIRD, True), (HOLDER, False)])
def test_wait_says_whether_another_stands_in_the_queue(look_for: bytes, is_there: bool) -> None:
    model, capabilities = server()
    model.put(KEY, HOLDER)
    drive(wait(token=THIRD), model, capabilities)
    operation = wait(look_for=look_for)
    drive(operation, model, capabilities)
    assert is_there is operation.is_there


def test_wait_leaves_a_foreign_holder_alone() -> None:
    model, capabilities = server()
    model.put(KEY, b"redis-py's", 700)
    operation = wait()
    drive(operation, model, capabilities)
    assert (operation.result, operation.foreign, operation.value) == (False, True, b"redis-py's")
    assert model.entry(KEY) == Entry(b"redis-py's", 700)


@pytest.mark.parametrize("mark", [b"", b"+"], ids=["unmarked", "marked"])
def test_wait_finds_that_the_lock_has_been_granted(mark: bytes) -> None:
    model, capabilities = server()
    model.put(KEY, TOKEN + mark)
    operation = wait()
    drive(operation, model, capabilities)
    assert (operation.result, operation.value) == (True, TOKEN + mark)


def test_wait_hands_a_lock_that_has_expired_to_the_first_in_the_queue() -> None:
    model, capabilities = server()
    listener = model.connect()
    model.execute(HELLO, listener)
    model.execute((b"SUBSCRIBE", CHANNEL), listener)
    model.put(KEY, HOLDER, 50)
    drive(wait(token=THIRD), model, capabilities)
    model.now_ms += 51
    operation = wait(token=TOKEN)
    drive(operation, model, capabilities)
    assert (operation.result, operation.value) == (False, THIRD + b"+")
    assert listener.inbox == [[b"message", CHANNEL, THIRD + b"+0"]]
    assert waiting(model) == [TOKEN]


def test_wait_that_makes_the_health_check_passes_over_a_sleeping_waiter() -> None:
    model, capabilities = server()
    listener = model.connect()
    model.execute(HELLO, listener)
    model.execute((b"SUBSCRIBE", CHANNEL), listener)
    model.put(KEY, HOLDER, 9000)
    drive(JoinQueue(KEY, THIRD, 0, b"publish", b"rlf:theirs", 5000, 60_000, b""), model, capabilities)
    model.now_ms += 5001
    drive(wait(look_for=THIRD), model, capabilities)
    assert waiting(model) == [TOKEN]


@DENIALS
def test_wait_is_denied_and_not_an_error(denial: hiredis.ReplyError) -> None:
    operation = wait()
    operation.request(Capabilities(), 1.0)
    assert operation.feed(denial, Capabilities())
    assert (bool(operation.denied), operation.result) == (True, False)


def test_wait_on_what_is_no_string_is_denied() -> None:
    model, capabilities = server()
    model.put(KEY, None)
    operation = wait()
    drive(operation, model, capabilities)
    assert (bool(operation.denied), operation.result) == (True, False)


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("failed", [True, False])
def test_wait_of_unknown_outcome_is_undone_either_way(sent: bool, failed: bool) -> None:
    # The first of two requests may still be executed, when nobody waits under this token any more.
    operation = wait()
    operation.request(Capabilities(), 1.0)
    operation.note_unanswered(sent)
    assert operation.to_clean_up(failed) == ([(KEY, TOKEN)] if sent else [])


def queue_up_the_dead(model: Model, count: int) -> None:
    """Waiters at the head of the queue whose process is gone, before any other."""
    waiters, fields = (model._items_to_fill(key) for key in queue_keys(KEY))
    for number in range(count):
        token = b"rlf:%032x" % number
        waiters[token] = number - count
        fields[b"t" + token] = (1000, b"publish", b"rlf:gone")


def test_wait_is_sent_again_while_too_many_waiters_are_gone() -> None:
    model, capabilities = server()
    queue_up_the_dead(model, 250)
    model.execute((b"EVAL", WAIT.text, *wait().request(capabilities, 1.0)[2:]))
    assert len(waiting(model)) == 201
    assert model.entry(KEY) is None
    operation = wait()
    drive(operation, model, capabilities)
    assert (operation.result, operation.value) == (True, TOKEN + b"+")


# ---- leave ----


def test_leave_leaves_a_lock_free_where_too_many_waiters_are_gone() -> None:
    model, capabilities = server()
    model.put(KEY, TOKEN + b"+")
    queue_up_the_dead(model, 150)
    drive(LeaveQueue(KEY, TOKEN), model, capabilities)
    assert model.entry(KEY) is None
    operation = LeaveQueue(KEY, TOKEN, keep=True, terms=1000)
    queue_up_the_dead(model, 150)
    drive(operation, model, capabilities)
    assert not operation.result
    assert model.entry(KEY) is None
    assert len(waiting(model)) == 100


def test_leave_gives_the_place_up() -> None:
    model, capabilities = server()
    model.put(KEY, HOLDER)
    drive(wait(), model, capabilities)
    operation = LeaveQueue(KEY, TOKEN)
    drive(operation, model, capabilities)
    assert not operation.result
    assert waiting(model) == []
    assert model.entry(KEY) == Entry(HOLDER + b"+")


def test_leave_passes_a_lock_on_that_was_granted_meanwhile() -> None:
    model, capabilities = server()
    listener = model.connect()
    model.execute(HELLO, listener)
    model.execute((b"SUBSCRIBE", CHANNEL), listener)
    drive(wait(), model, capabilities)
    drive(wait(token=THIRD), model, capabilities)
    operation = LeaveQueue(KEY, TOKEN)
    drive(operation, model, capabilities)
    assert not operation.result
    assert model.entry(KEY) == Entry(THIRD + b"+", 1000)
    assert [push[2] for push in listener.inbox] == [THIRD + b"+0"]


def test_leave_keeps_a_lock_that_was_granted_meanwhile_if_asked_to() -> None:
    model, capabilities = server()
    drive(wait(), model, capabilities)
    operation = LeaveQueue(KEY, TOKEN, keep=True)
    drive(operation, model, capabilities)
    assert (operation.result, operation.value) == (True, TOKEN + b"+")
    assert model.entry(KEY) == Entry(TOKEN + b"+", 1000)


@pytest.mark.parametrize("is_queued", [False, True])
def test_leave_takes_a_free_lock_if_asked_to(is_queued: bool) -> None:
    model, capabilities = server()
    if is_queued:
        model.put(KEY, HOLDER)
        drive(wait(), model, capabilities)
        model.remove(KEY)
    operation = LeaveQueue(KEY, TOKEN, keep=True, terms=1000)
    drive(operation, model, capabilities)
    assert (operation.result, operation.value) == (True, TOKEN + b"+")
    assert model.entry(KEY) == Entry(TOKEN + b"+", 1000)
    assert waiting(model) == []


def test_leave_gives_a_free_lock_to_the_first_in_the_queue_even_if_asked_to_keep_it() -> None:
    model, capabilities = server()
    listener = model.connect()
    model.execute(HELLO, listener)
    model.execute((b"SUBSCRIBE", CHANNEL), listener)
    model.put(KEY, HOLDER)
    drive(wait(token=THIRD), model, capabilities)
    model.now_us += 1
    drive(wait(), model, capabilities)
    model.remove(KEY)
    operation = LeaveQueue(KEY, TOKEN, keep=True, terms=1000)
    drive(operation, model, capabilities)
    assert not operation.result
    assert model.entry(KEY) == Entry(THIRD + b"+", 1000)
    assert waiting(model) == []


@pytest.mark.parametrize("mark", [b"", b"+"], ids=["unmarked", "marked"])
@pytest.mark.parametrize("server_name", ["Valkey 9", "Redis 8.4"])
def test_leave_releases_where_scripts_are_forbidden(server_name: str, mark: bytes) -> None:
    model = Model(SERVERS[server_name], frozenset({"EVAL", "EVALSHA"}))
    capabilities = Capabilities(model.execute(PROBE))
    model.put(KEY, TOKEN + mark)
    operation = LeaveQueue(KEY, TOKEN, keep=True)
    drive(operation, model, capabilities)
    assert not operation.result  # released, not kept
    assert model.entry(KEY) is None


def test_leave_of_what_is_no_string_is_finished() -> None:
    operation = LeaveQueue(KEY, TOKEN)
    operation.request(Capabilities(), 1.0)
    assert operation.feed(hiredis.ReplyError(WRONGTYPE), Capabilities())
    assert not operation.result


# ---- undo ----


LEAVES = (3, KEY, *queue_keys(KEY), TOKEN, b"pass on")


@pytest.mark.parametrize(
    ("server_name", "requests", "of_a_callers_token"),
    [
        ("Valkey 9", [(b"DELIFEQ", KEY, TOKEN), (b"DELIFEQ", KEY, TOKEN + b"+")], (b"DELIFEQ", KEY, b"own")),
        (
            "Redis 8.4",
            [(b"DELEX", KEY, b"IFEQ", TOKEN), (b"DELEX", KEY, b"IFEQ", TOKEN + b"+")],
            (b"DELEX", KEY, b"IFEQ", b"own"),
        ),
        ("Redis 7.0", [], (b"EVAL", RELEASE.text, 1, KEY, b"own")),
    ],
)
def test_undo_needs_no_cached_script(server_name: str, requests: list[Args], of_a_callers_token: Args) -> None:
    capabilities = Capabilities(Model(SERVERS[server_name]).execute(PROBE))
    assert cleanup_requests(capabilities, [(KEY, TOKEN)]) == [(b"EVAL", LEAVE.text, *LEAVES), *requests]
    assert cleanup_requests(capabilities, [(KEY, b"own")]) == [of_a_callers_token]


def test_undo_of_many_sends_the_script_once() -> None:
    requests = cleanup_requests(Capabilities(), [(KEY, TOKEN), (KEY, TOKEN)])
    assert requests == [(b"EVAL", LEAVE.text, *LEAVES), (b"EVALSHA", LEAVE.sha, *LEAVES)]


def test_undo_gives_a_place_in_the_queue_up() -> None:
    model, capabilities = server()
    model.put(KEY, HOLDER)
    drive(wait(), model, capabilities)
    for request in cleanup_requests(capabilities, [(KEY, TOKEN)]):
        model.execute(request)
    assert waiting(model) == []
    assert model.entry(KEY) == Entry(HOLDER + b"+")


def test_undo_hands_over_a_lock_that_was_marked_meanwhile() -> None:
    model, capabilities = server()
    model.put(KEY, TOKEN)
    listener = model.connect()
    model.execute(HELLO, listener)
    model.execute((b"SUBSCRIBE", CHANNEL), listener)
    drive(wait(token=THIRD), model, capabilities)
    for request in cleanup_requests(capabilities, [(KEY, TOKEN)]):
        model.execute(request)
    assert model.entry(KEY) == Entry(THIRD + b"+", 1000)


@pytest.mark.parametrize("mark", [b"", b"+"], ids=["unmarked", "marked"])
@pytest.mark.parametrize("server_name", ["Valkey 9", "Redis 8.4"])
def test_undo_deletes_where_scripts_are_forbidden(server_name: str, mark: bytes) -> None:
    model = Model(SERVERS[server_name], frozenset({"EVAL", "EVALSHA"}))
    model.put(KEY, TOKEN + mark)
    for request in cleanup_requests(Capabilities(model.execute(PROBE)), [(KEY, TOKEN)]):
        model.execute(request)
    assert model.entry(KEY) is None


# ---- watch ----


def test_watch_request() -> None:
    assert Watch(KEY).request(Capabilities(), 1.0) == [
        (b"CLIENT", b"TRACKING", b"ON", b"OPTIN"),
        (b"CLIENT", b"CACHING", b"YES"),
        (b"GET", KEY),
    ]


@pytest.mark.parametrize(("last", "value"), [(HOLDER, HOLDER), (None, None), (hiredis.ReplyError(WRONGTYPE), None)])
def test_watch_says_what_stands_there(last: Reply, value: bytes | None) -> None:
    operation = Watch(KEY)
    assert operation.feed([b"OK", b"OK", last], Capabilities())
    assert operation.value == value


@pytest.mark.parametrize("denied_at", [0, 1, 2])
@DENIALS
def test_watch_is_denied_and_not_an_error(denial: hiredis.ReplyError, denied_at: int) -> None:
    operation = Watch(KEY)
    replies: list[Reply] = [b"OK", b"OK", HOLDER]
    replies[denied_at] = denial
    assert operation.feed(replies, Capabilities())
    assert operation.denied


def test_watch_is_told_of_one_change() -> None:
    model, capabilities = server()
    model.put(KEY, HOLDER)
    connection = model.connect()
    model.execute(HELLO, connection)
    operation = Watch(KEY)
    assert operation.feed(
        [model.execute(each, connection) for each in operation.request(capabilities, 1.0)], capabilities
    )
    model.remove(KEY)
    model.put(KEY, THIRD)
    assert connection.inbox == [[b"invalidate", [KEY]]]


# ---- subscribe ----


@pytest.mark.parametrize(
    ("reply", "result"), [([b"subscribe", CHANNEL, 1], True), (NOPERM, False), (UNKNOWN_COMMAND, False)], ids=str
)
def test_subscribe(reply: Reply, result: bool) -> None:
    _, capabilities = server()
    operation = Subscribe(KEY, b"SUBSCRIBE", CHANNEL)
    assert operation.request(capabilities, 1.0) == (b"SUBSCRIBE", CHANNEL)
    assert operation.feed(reply, capabilities)
    assert result is operation.result


# ---- errors that several operations share ----


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("LOADING Redis is loading the dataset in memory", NotExecuted),
        ("READONLY You can't write against a read only replica.", NotExecuted),
        ("BUSY Redis is busy running a script.", NotExecuted),
        ("ERR Error running script (call to f_0): @user_script:7: @user_script: 7: -READONLY You can't.", NotExecuted),
        ("MOVED 5798 127.0.0.1:7001", Redirected),
    ],
    ids=lambda value: str(value).split()[0],
)
def test_errors_that_mean_later_or_elsewhere(text: str, error: type[Exception]) -> None:
    _, capabilities = server()
    reply = hiredis.ReplyError(text)
    operations: list[Operation] = [wait(), LeaveQueue(KEY, TOKEN), Watch(KEY), Subscribe(KEY, b"SUBSCRIBE", CHANNEL)]
    for operation in operations:
        before = operation.request(capabilities, 1.0)
        with pytest.raises(error):
            operation.feed([reply] * 3 if operation.is_pipeline else reply, capabilities)
        assert before == operation.request(capabilities, 1.0)
        assert not operation.unsettled


def test_the_second_form_of_leaving_is_a_release() -> None:
    capabilities = Capabilities()
    operation = LeaveQueue(KEY, TOKEN)
    operation.request(capabilities, 1.0)
    assert not operation.feed(NOPERM, capabilities)
    assert (b"EVALSHA", RELEASE.sha, 1, KEY, TOKEN, b"1") == operation.request(capabilities, 1.0)
