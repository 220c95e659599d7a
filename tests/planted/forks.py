"""Faults of forked children."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_FORKS = "tests/integration/lock/test_forks.py::"
_NOTICING = "tests/unit/util/test_fork.py::"

FAULTS = (
    Fault(
        "fork of which Python knows nothing is not noticed",
        "_util/fork.py",
        "    if process != _known:\n",
        "    if False:\n",
        f"{_FORKS}test_children_exclude_each_other[threads-used-children]",
    ),
    Fault(
        "compiled: fork of which Python knows nothing is not noticed",
        "_pipe/forks.pyx",
        "    if seen != forks:\n",
        "    if False:\n",
        f"{_FORKS}test_children_exclude_each_other[threads-used-children]",
    ),
    Fault(
        "compiled: connection of the parent is used in a child that has not noticed the fork",
        "_pipe/threads.pyx",
        "        return self.process != forks\n",
        "        return self.process < 0\n",
        "tests/pipe/test_threads_reader.py"
        "::test_a_call_in_which_a_push_is_taken_by_what_forks_goes_on_in_the_parent_alone[compiled-unannounced]",
    ),
    Fault(
        "thread of a child goes on while another one has things forgotten",
        "_util/fork.py",
        "    with _turns.setdefault(process, threading.RLock()):\n",
        "    with contextlib.nullcontext():\n",
        f"{_NOTICING}test_no_thread_goes_on_before_another_one_has_had_all_forgotten",
    ),
    Fault(
        "interrupt leaves a child with what is its parent's",
        "_util/fork.py",
        "        left = _left.get(process)\n",
        "        left, _known = _left.get(process), process\n",
        f"{_NOTICING}test_after_an_interrupt_the_next_caller_goes_on_with_the_rest",
    ),
    Fault(
        "child that ends gives back the keys of its parent",
        "_linger/threads.py",
        "    fork.generation()  # has the parent's forgotten in a child\n",
        "",
        f"{_FORKS}test_a_child_that_ends_gives_back_nothing_of_its_parents[unannounced-False]",
    ),
    Fault(
        "child that closes its client gives back the keys of its parent",
        "_transport/pool_events.py",
        "        fork.generation()  # has them forget in a child\n",
        "",
        f"{_FORKS}test_a_child_that_ends_gives_back_nothing_of_its_parents[unannounced-True]",
    ),
    Fault(
        "child of multiprocessing leaves what lingers there",
        "_linger/threads.py",
        "        at_child_exit(_give_back_at_exit)\n",
        "",
        "tests/integration/lingering/test_children.py"
        "::test_what_lingers_in_a_child_is_given_back_at_its_end[fork-unused]",
    ),
)
