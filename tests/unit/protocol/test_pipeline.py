"""The machines for many locks: their requests in each dialect, and what they make of each reply.

Rules: no server, no clock; replies are as hiredis parses them.
"""

from __future__ import annotations

import hiredis
import pytest

from redislock_fast._pipe.base import Args, Bulk, Reply
from redislock_fast._protocol.capabilities import PROBE, Capabilities
from redislock_fast._protocol.commands import Acquire, Extend, Reacquire, Release
from redislock_fast._protocol.operation import NotExecuted, Operation, Redirected, Refused
from redislock_fast._protocol.pipeline import Pipeline, ReleasePipeline
from redislock_fast._protocol.scripts import RELEASE
from tests.simulation.model import SERVERS, WRONGTYPE, Model

KEYS = [b"a", b"b", b"c"]
TOKEN = b"token"
RIVAL = b"rival"

LOADING = hiredis.ReplyError("LOADING Redis is loading the dataset in memory")
MOVED = hiredis.ReplyError("MOVED 5798 127.0.0.1:7001")
NOPERM = hiredis.ReplyError("NOPERM User u has no permissions to run the command")
NOSCRIPT = hiredis.ReplyError("NOSCRIPT No matching script. Please use EVAL.")
OOM = hiredis.ReplyError("OOM command not allowed when used memory > 'maxmemory'.")
WRONG = hiredis.ReplyError(WRONGTYPE)

EACH_SERVER = pytest.mark.parametrize("server", SERVERS)
FREE: dict[str, Reply] = {name: b"OK" if name == "Redis 6.2" else None for name in SERVERS}
TAKEN: dict[str, Reply] = {name: None if name == "Redis 6.2" else RIVAL for name in SERVERS}


def capabilities_of(server: str) -> Capabilities:
    return Capabilities(Model(SERVERS[server]).execute(PROBE))


def requests_of(machine: Pipeline, capabilities: Capabilities, now: float = 1.0) -> list[Args]:
    """The next requests, one by one."""
    requests = machine.request(capabilities, now)
    return requests.requests() if isinstance(requests, Bulk) else requests


def releasing(server: str, doubtful: bool = False) -> tuple[ReleasePipeline, Capabilities]:
    """A machine whose first requests have left, within the leases."""
    machine, capabilities = ReleasePipeline(KEYS, TOKEN, 5.0, doubtful), capabilities_of(server)
    machine.request(capabilities, 1.0)
    return machine, capabilities


def answer(machine: Pipeline, capabilities: Capabilities, replies: list[Reply], refusal: Reply, refused: bytes) -> None:
    """Give these replies, and from then on those of a server that refuses all that names this key."""
    while not machine.feed(replies, capabilities):
        replies = [refusal if refused in request else 1 for request in requests_of(machine, capabilities)]


@EACH_SERVER
def test_release_sends_what_release_of_one_lock_sends(server: str) -> None:
    capabilities = capabilities_of(server)
    assert [Release(key, TOKEN, 5.0).request(capabilities, 1.0) for key in KEYS] == requests_of(
        ReleasePipeline(KEYS, TOKEN, 5.0), capabilities
    )


@EACH_SERVER
def test_release_tells_what_was_ours(server: str) -> None:
    machine, capabilities = releasing(server)
    assert machine.feed([1, 0, 1], capabilities)
    assert ([True, False, True], False, True) == (machine.results, machine.unsettled, machine.valid)
    assert [] == machine.to_clean_up(failed=True)


def test_release_of_an_unknown_script_sends_its_text() -> None:
    machine, capabilities = releasing("Redis 7.0")
    assert not machine.feed([NOSCRIPT] * 3, capabilities)
    assert [(b"EVAL", RELEASE.text, 1, key, TOKEN, b"1") for key in KEYS] == requests_of(machine, capabilities)
    assert machine.feed([1, 1, 0], capabilities)
    assert [True, True, False] == machine.results


def test_release_goes_on_by_script_where_the_command_is_refused() -> None:
    machine, capabilities = releasing("Valkey 9")
    assert not machine.feed([NOPERM] * 3, capabilities)
    assert [(b"EVALSHA", RELEASE.sha, 1, key, TOKEN, b"1") for key in KEYS] == requests_of(machine, capabilities)
    assert machine.feed([1] * 3, capabilities)
    assert capabilities.release is None


def test_release_of_what_is_no_string_was_not_ours() -> None:
    machine, capabilities = releasing("Valkey 9")
    assert machine.feed([1, WRONG, 1], capabilities)
    assert [True, False, True] == machine.results


@pytest.mark.parametrize(("sent", "result"), [(True, True), (False, False)])
def test_release_that_finds_nothing_after_a_loss_was_executed_if_it_had_left(sent: bool, result: bool) -> None:
    machine, capabilities = releasing("Valkey 9")
    machine.note_unanswered(sent)
    requests_of(machine, capabilities, 2.0)
    assert machine.feed([1, 0, 0], capabilities)
    assert [True, result, result] == machine.results


def test_release_that_left_after_the_lease_is_given_no_credit_for_a_loss() -> None:
    machine, capabilities = ReleasePipeline(KEYS, TOKEN, 5.0), capabilities_of("Valkey 9")
    machine.request(capabilities, 6.0)
    machine.note_unanswered(sent=True)
    requests_of(machine, capabilities, 7.0)
    assert machine.feed([0, 0, 0], capabilities)
    assert ([False] * 3, False) == (machine.results, machine.valid)


def test_a_doubtful_release_that_finds_nothing_was_executed_before() -> None:
    machine, capabilities = releasing("Valkey 9", doubtful=True)
    assert machine.feed([0, 1, 0], capabilities)
    assert [True] * 3 == machine.results


def test_a_name_that_is_refused_keeps_no_other_from_its_verdict() -> None:
    machine, capabilities = releasing("Redis 7.0")
    with pytest.raises(Refused, match="NOPERM"):
        answer(
            machine, capabilities, [NOPERM, NOSCRIPT, NOSCRIPT], NOPERM, b"a"
        )  # rights are looked at before the script
    assert ([False, True, True], [0]) == (machine.results, machine.unfinished)


def test_many_drives_each_machine_to_its_end() -> None:
    capabilities = capabilities_of("Redis 7.0")
    operations: list[Operation] = [
        Reacquire(b"a", TOKEN, 1000),
        Extend(b"b", TOKEN, 500, False, 9.0),
        Release(b"c", TOKEN, None),
    ]
    many = Pipeline(operations)
    assert (3, b"a") == (len(many), many.key)
    assert [b"EVALSHA"] * 3 == [request[0] for request in requests_of(many, capabilities)]
    assert not many.feed([1, NOSCRIPT, NOSCRIPT], capabilities)
    assert (b"b", [1, 2]) == (many.key, many.unfinished)
    assert [b"EVAL"] * 2 == [request[0] for request in requests_of(many, capabilities)]
    assert many.feed([0, 1], capabilities)
    assert [True, False, True] == many.results
    assert [] == many.to_clean_up(failed=True)


def test_many_undoes_what_its_machines_undo() -> None:
    capabilities = capabilities_of("Valkey 9")
    many = Pipeline([Acquire(key, TOKEN, None) for key in KEYS])
    requests_of(many, capabilities)
    many.note_unanswered(sent=True)
    requests_of(many, capabilities)
    assert many.feed([TOKEN, RIVAL, None], capabilities)
    assert ([True, False, True], [(b"b", TOKEN)]) == (many.results, many.to_clean_up(failed=False))


@pytest.mark.parametrize(("trouble", "error"), [(LOADING, NotExecuted), (MOVED, Redirected), (OOM, Refused)], ids=str)
@EACH_SERVER
def test_trouble_of_one_name_leaves_the_others_their_verdicts(
    server: str, trouble: Reply, error: type[Exception]
) -> None:
    machine, capabilities = releasing(server)
    with pytest.raises(error):
        answer(machine, capabilities, [1, trouble, 1], trouble, b"b")
    assert ([True, False, True], [1]) == (machine.results, machine.unfinished)
    if error is not Refused:
        assert b"b" == machine.key
        assert 1 == len(requests_of(machine, capabilities))
        assert machine.feed([1], capabilities)
        assert [True] * 3 == machine.results


@pytest.mark.parametrize("later", [LOADING, MOVED], ids=str)
def test_a_refusal_is_raised_when_all_others_have_their_verdict(later: Reply) -> None:
    for replies in ([later, OOM, later], [OOM, later, None]):
        machine, capabilities = Pipeline([Acquire(key, TOKEN, 1000) for key in KEYS]), capabilities_of("Valkey 9")
        machine.request(capabilities, 1.0)
        with pytest.raises((NotExecuted, Redirected)):
            machine.feed(replies, capabilities)
        with pytest.raises(Refused, match="OOM"):
            machine.feed([None] * len(requests_of(machine, capabilities)), capabilities)
        assert 2 == machine.results.count(True)
