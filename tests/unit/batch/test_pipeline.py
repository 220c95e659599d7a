"""The machine that acquires many locks: its requests in each dialect, and what it makes of each reply.

At the end thousands of schedules of lost requests and replies against the model server, releases included. Rules: no
server, no clock, no chance except a seed's; replies are as hiredis parses them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import hiredis
import pytest

from redislock_fast._batch.acquisition import AcquirePipeline
from redislock_fast._pipe.base import Args, Malformed, Reply
from redislock_fast._protocol.capabilities import PROBE, Capabilities
from redislock_fast._protocol.commands import Acquire, Release
from redislock_fast._protocol.operation import NotExecuted, Redirected, Refused
from redislock_fast._protocol.pipeline import Pipeline, ReleasePipeline
from redislock_fast._protocol.queue import cleanup_requests
from tests.simulation.keyspace import Entry
from tests.simulation.model import SERVERS, Model
from tests.support.selection import in_two_runs
from tests.unit.protocol.test_pipeline import (
    EACH_SERVER,
    KEYS,
    LOADING,
    MOVED,
    NOPERM,
    OOM,
    RIVAL,
    TOKEN,
    answer,
    capabilities_of,
    requests_of,
)

FREE: dict[str, Reply] = {name: b"OK" if name == "Redis 6.2" else None for name in SERVERS}
TAKEN: dict[str, Reply] = {name: None if name == "Redis 6.2" else RIVAL for name in SERVERS}


def acquiring(server: str, ttl_ms: int | None = 1000) -> tuple[AcquirePipeline, Capabilities]:
    """A machine whose first requests have left."""
    machine, capabilities = AcquirePipeline(KEYS, TOKEN, ttl_ms), capabilities_of(server)
    machine.request(capabilities, 1.0)
    return machine, capabilities


@pytest.mark.parametrize("ttl_ms", [None, 1500])
@EACH_SERVER
def test_acquire_sends_what_acquire_of_one_lock_sends(server: str, ttl_ms: int | None) -> None:
    capabilities = capabilities_of(server)
    machine = AcquirePipeline(KEYS, TOKEN, ttl_ms)
    assert [Acquire(key, TOKEN, ttl_ms).request(capabilities, 1.0) for key in KEYS] == requests_of(
        machine, capabilities
    )


@pytest.mark.parametrize("key", [b"", b"NX", b"SET", TOKEN])
@EACH_SERVER
def test_a_key_that_looks_like_another_word_stands_in_its_place(server: str, key: bytes) -> None:
    for machine, one in (
        (AcquirePipeline([b"a", key], TOKEN, 1500), Acquire(key, TOKEN, 1500)),
        (ReleasePipeline([b"a", key], TOKEN, None), Release(key, TOKEN, None)),
    ):
        capabilities = capabilities_of(server)
        assert one.request(capabilities, 1.0) == requests_of(machine, capabilities)[1]


@EACH_SERVER
def test_acquire_takes_all(server: str) -> None:
    machine, capabilities = acquiring(server)
    assert machine.feed([FREE[server]] * 3, capabilities)
    assert ([True] * 3, [], 1.0) == (machine.results, machine.unfinished, machine.sent_at)
    assert [] == machine.to_clean_up(failed=False)


@EACH_SERVER
def test_acquire_takes_what_is_free(server: str) -> None:
    machine, capabilities = acquiring(server)
    finished = machine.feed([FREE[server], TAKEN[server], FREE[server]], capabilities)
    if server == "Redis 6.2":  # nil does not say whose it is
        assert not finished
        assert [(b"GET", b"b")] == requests_of(machine, capabilities)
        assert machine.feed([RIVAL], capabilities)
    assert [True, False, True] == machine.results
    assert [] == machine.to_clean_up(failed=False)
    assert [(b"a", TOKEN), (b"c", TOKEN)] == machine.to_clean_up(failed=True)


def test_acquire_without_any_free_is_finished() -> None:
    machine, capabilities = acquiring("Valkey 9")
    assert machine.feed([b"x", b"", b"OK"], capabilities)
    assert [False] * 3 == machine.results


@EACH_SERVER
def test_acquire_lost_unsent_is_sent_again_and_knows_no_doubt(server: str) -> None:
    machine, capabilities = acquiring(server)
    machine.note_unanswered(sent=False)
    assert [Acquire(key, TOKEN, 1000).request(capabilities, 2.0) for key in KEYS] == requests_of(
        machine, capabilities, 2.0
    )
    assert machine.feed([FREE[server]] * 3, capabilities)
    assert ([True] * 3, False, 1.0) == (machine.results, machine.unsettled, machine.sent_at)


def test_acquire_whose_replies_were_lost_finds_its_own_token() -> None:
    machine, capabilities = acquiring("Valkey 9")
    machine.note_unanswered(sent=True)
    requests_of(machine, capabilities, 2.0)
    assert machine.feed([TOKEN, RIVAL, None], capabilities)
    assert ([True, False, True], True, 1.0) == (machine.results, machine.unsettled, machine.sent_at)
    assert [(b"b", TOKEN)] == machine.to_clean_up(failed=False)
    assert [(key, TOKEN) for key in KEYS] == sorted(machine.to_clean_up(failed=True))


def test_acquire_that_finds_its_token_without_a_loss_does_not_take_it_for_its_own() -> None:
    machine, capabilities = acquiring("Valkey 9")
    assert machine.feed([TOKEN, None, None], capabilities)
    assert [False, True, True] == machine.results


def test_acquire_whose_second_requests_were_lost_finds_its_own_token() -> None:
    machine, capabilities = acquiring("Redis 6.2")
    assert not machine.feed([b"OK", None, None], capabilities)
    machine.note_unanswered(sent=True)
    finished = False
    while not finished:  # whether it asks by SET or by GET, the keys hold its token
        requests = requests_of(machine, capabilities)
        assert [b"b", b"c"] == [request[1] for request in requests]
        finished = machine.feed([TOKEN if request[0] == b"GET" else None for request in requests], capabilities)
    assert [True] * 3 == machine.results


def test_a_lost_acquire_that_failed_undoes_all() -> None:
    machine, _ = acquiring("Valkey 9")
    machine.note_unanswered(sent=True)
    assert [(key, TOKEN) for key in KEYS] == machine.to_clean_up(failed=True)


def test_an_acquire_that_never_left_undoes_nothing() -> None:
    machine = AcquirePipeline(KEYS, TOKEN, None)
    machine.note_unanswered(sent=False)
    assert [] == machine.to_clean_up(failed=True)


@pytest.mark.parametrize(("trouble", "error"), [(LOADING, NotExecuted), (MOVED, Redirected), (OOM, Refused)], ids=str)
@EACH_SERVER
def test_trouble_of_one_name_leaves_the_others_their_verdicts(
    server: str, trouble: Reply, error: type[Exception]
) -> None:
    machine, capabilities = acquiring(server)
    with pytest.raises(error):
        answer(machine, capabilities, [FREE[server], trouble, FREE[server]], trouble, b"b")
    assert ([True, False, True], [1]) == (machine.results, machine.unfinished)
    if error is not Refused:
        assert b"b" == machine.key
        assert 1 == len(requests_of(machine, capabilities))
        assert machine.feed([FREE[server]], capabilities)
        assert [True] * 3 == machine.results


def test_acquire_goes_on_without_get_where_it_is_refused() -> None:
    machine, capabilities = acquiring("Valkey 9")
    assert not machine.feed([None, NOPERM, RIVAL], capabilities)
    assert [(b"SET", b"b", TOKEN, b"NX", b"PX", 1000)] == requests_of(machine, capabilities)
    assert machine.feed([b"OK"], capabilities)
    assert not capabilities.set_get
    assert [True, True, False] == machine.results


def test_acquire_reads_its_replies_by_the_dialect_in_which_it_asked() -> None:
    machine, capabilities = acquiring("Valkey 9")
    capabilities.set_get = False  # a neighbour has learnt it meanwhile
    assert machine.feed([None, b"OK", None], capabilities)
    assert [True, False, True] == machine.results


@pytest.mark.parametrize("odd", [7, -1, 1.5, [], {}])
def test_no_reply_counts_where_one_is_malformed(odd: Reply) -> None:
    machine, capabilities = acquiring("Valkey 9")
    with pytest.raises(Malformed):
        machine.feed([None, OOM, odd], capabilities)
    assert (machine.results, machine.unfinished) == ([False] * 3, [0, 1, 2])
    machine.note_unanswered(sent=True)
    asked = requests_of(machine, capabilities, 2.0)
    assert [key in words for words, key in zip(asked, KEYS, strict=True)] == [True] * 3
    assert machine.feed([TOKEN] * 3, capabilities)
    assert machine.results == [True] * 3


_ERRORS = (LOADING, MOVED, hiredis.ReplyError("TRYAGAIN Multiple keys request during rehashing of slot"))


class Schedule:
    """Locks taken, taken away by rivals, and given back, over a connection that loses what it likes.

    Checked after every machine, however it ended:
        - nobody's lock but ours is ever changed, and an acquire changes free keys alone;
        - an acquire that ended holds exactly what its results say; one that did not, only what it asks to have undone;
        - a release that ended leaves nothing of ours, and says True of every name that it deleted within the lease.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._model = Model(self._random.choice(list(SERVERS.values())))
        self._keys = [b"key-%d" % number for number in range(self._random.choice((1, 2, 5)))]
        self._capabilities = Capabilities(self._model.execute(PROBE))
        self._deleted: set[bytes] = set()
        for key in self._keys:
            if self._random.random() < 0.3:
                self._model.put(key, RIVAL, self._random.choice((None, 40)))

    def run(self) -> None:
        ttl_ms = self._random.choice((None, 60, 10_000))
        acquire = AcquirePipeline(self._keys, TOKEN, ttl_ms)
        finished = self._drive(acquire)
        won = [key for key, ours in zip(self._keys, acquire.results, strict=True) if ours]
        if finished and ttl_ms != 60:
            assert won == self._ours()
        if finished:
            assert set(self._ours()) <= set(won)
        undone = acquire.to_clean_up(failed=not finished)
        assert finished or set(self._ours()) <= {key for key, _ in undone}
        for request in cleanup_requests(self._capabilities, undone):
            self._model.execute(request)
        if not finished:
            assert [] == self._ours()
        elif won:
            self._release(won, None if ttl_ms is None else acquire.sent_at + ttl_ms / 1000)

    def _release(self, keys: list[bytes], expires_at: float | None) -> None:
        doubtful, self._deleted = False, set()
        for _ in range(3):
            release = ReleasePipeline(keys, TOKEN, expires_at, doubtful)
            if self._drive(release, expires_at):
                assert [] == self._ours()
                told = {key for key, ours in zip(keys, release.results, strict=True) if ours}
                assert self._deleted & set(keys) <= told
                return
            doubtful = release.unsettled and release.valid
            keys = [keys[index] for index in release.unfinished]

    def _ours(self) -> list[bytes]:
        return [key for key in self._keys if (self._entry(key) or Entry(None)).value == TOKEN]

    def _entry(self, key: bytes) -> Entry | None:
        return self._model.entry(key)

    def _drive(self, machine: AcquirePipeline | ReleasePipeline, valid_until: float | None = None) -> bool:
        for _ in range(self._random.choice((1, 2, 4))):
            while True:
                self._meanwhile()
                left_at = self._model.now_ms / 1000
                requests = requests_of(machine, self._capabilities, left_at)
                fault = self._random.random()
                # A connection may break between any two requests or replies; all replies are lost then.
                executed = self._random.randrange(len(requests) + 1) if fault < 0.2 else len(requests)
                replies = [self._execute(machine, request, left_at, valid_until) for request in requests[:executed]]
                if fault < 0.4:
                    machine.note_unanswered(sent=executed > 0 or self._random.random() < 0.5)
                    self._capabilities = Capabilities(self._model.execute(PROBE))
                    break
                try:
                    if machine.feed(replies, self._capabilities):
                        return True
                except (NotExecuted, Redirected):
                    break
        return False

    def _meanwhile(self) -> None:
        self._model.now_ms += self._random.choice((0, 0, 1, 30))
        if self._random.random() < 0.1:
            self._model.flush_scripts()
        if self._random.random() < 0.1:  # a neighbour on the connection is refused something
            self._capabilities.set_get = False
            self._capabilities.release = None
        for key in self._keys:
            entry = self._entry(key)
            if entry is None and self._random.random() < 0.1:
                self._model.put(key, RIVAL, 50)
            elif entry is not None and entry.value == RIVAL and self._random.random() < 0.2:
                del self._model.entries[key]

    def _execute(self, machine: Pipeline, request: Args, left_at: float, valid_until: float | None) -> Reply:
        if self._random.random() < 0.05:
            return self._random.choice(_ERRORS)
        before = {key: self._entry(key) for key in self._keys}
        reply = self._model.execute(request)
        for key, was in before.items():
            now = self._entry(key)
            if was == now:
                continue
            assert key in request
            assert was is None if isinstance(machine, AcquirePipeline) else was is not None and was.value == TOKEN
            if now is None and (valid_until is None or left_at < valid_until):
                self._deleted.add(key)
        return reply


def _failures(seeds: range) -> Iterator[str]:
    for seed in seeds:
        try:
            Schedule(seed).run()
        except AssertionError as failure:
            yield f"seed {seed}: {failure}"


@in_two_runs(range(10_000), 2_000)
def test_no_schedule_breaks_a_promise(seeds: range) -> None:
    assert next(_failures(seeds), None) is None


@pytest.mark.parametrize(
    ("machine", "method", "broken"),
    [
        (AcquirePipeline, "to_clean_up", lambda self, failed: []),
        (Acquire, "note_unanswered", lambda self, sent: None),
        (Pipeline, "note_unanswered", lambda self, sent: None),
        (Release, "plain_replies", lambda self: (1, int)),
    ],
    ids=["nothing undone", "losses forgotten", "losses untold", "doubts forgotten"],
)
def test_schedules_find_a_planted_fault(
    machine: type, method: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, method, broken)
    assert next(_failures(range(10_000)), None) is not None
