"""The drivers of threads and of tasks: steps that raise, and a signal handler that forks between two steps.

Rules: no server. The transports do what the test says.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from redislock_fast._pipe.base import Forked
from redislock_fast._procedures.call import CleanupEntries
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._transport.loop import driver as loop_driver
from redislock_fast._transport.threads import cluster as thread_cluster
from redislock_fast._transport.threads import driver as thread_driver
from redislock_fast._util import fork

ENTRY = (b"name", b"token")

Drive = Callable[["Transport", Steps, CleanupEntries], Any]


class Transport:
    """Notes what is to be cleaned up."""

    def __init__(self) -> None:
        self.cleaned_up: CleanupEntries = []

    def of_running_loop(self) -> Transport:
        """The same for each loop."""
        return self

    def clean_up(self, entries: CleanupEntries) -> None:
        """Note the entries."""
        self.cleaned_up += entries


def in_thread(transport: Transport, steps: Steps, to_clean_up: CleanupEntries) -> Any:
    """Drive the steps in this thread."""
    return thread_driver.drive(transport, steps, to_clean_up)


def in_task(transport: Transport, steps: Steps, to_clean_up: CleanupEntries) -> Any:
    """Drive the steps in a task."""
    return asyncio.run(loop_driver.drive(transport, steps, to_clean_up))


BY_EACH = pytest.mark.parametrize("drive", [in_thread, in_task], ids=["threads", "tasks"])


@BY_EACH
@pytest.mark.parametrize("fails", [True, False])
def test_entries_of_steps_are_cleaned_up_when_they_have_ended(drive: Drive, fails: bool) -> None:
    transport = Transport()
    to_clean_up: CleanupEntries = []

    def steps() -> Steps:
        yield Do("sleep", 0)
        to_clean_up.append(ENTRY)
        if fails:
            raise LookupError
        return "done"

    if fails:
        with pytest.raises(LookupError):
            drive(transport, steps(), to_clean_up)
    else:
        assert drive(transport, steps(), to_clean_up) == "done"
    assert transport.cleaned_up == [ENTRY]


def test_steps_in_which_a_signal_handler_forks_end_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def hook() -> None:
        asked.append("a hook")
        monkeypatch.setattr(fork, "generation", lambda: -1)

    def steps() -> Steps:
        yield Do("call", hook)
        yield Do("call", hook)

    with pytest.raises(Forked):
        in_thread(Transport(), steps(), [])
    assert asked == ["a hook"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_forked_cluster_and_its_node_share_a_new_set_of_callers(order: tuple[int, int]) -> None:
    former = {1}
    cluster: Any = object.__new__(thread_cluster.ThreadClusterTransport)
    node: Any = object.__new__(thread_cluster._Node)
    node._cluster = weakref.ref(cluster)
    for transport in (cluster, node):
        transport._child, transport.inside = 0, former
    for index in order:
        (cluster, node)[index].forget_inside()
    assert node.inside is cluster.inside
    assert cluster.inside == set()
    assert former == {1}, "its lock may be taken: it is not touched"
