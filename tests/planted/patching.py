"""Faults of going on after gevent or eventlet has patched the standard library."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_TESTS = "tests/integration/lock/test_patched_later.py::test_"
_OWNERS = f"{_TESTS}each_greenlet_is_an_owner_of_a_lock_from_before_the_patch[used-gevent]"
_HELD = f"{_TESTS}lock_that_is_held_across_the_patch_stays_its_holders[gevent]"

FAULTS = (
    Fault(
        "greenlets share the owner of a lock from before a patch",
        "_procedures/lock.py",
        "                self._owners = self._heirs_of(self._owners)\n",
        "                pass\n",
        _OWNERS,
    ),
    Fault(
        "greenlet that another one overtakes makes owners of its own after a patch",
        "_procedures/lock.py",
        "        if self._local is not patching.in_force:",
        "        if True:",
        "tests/unit/transport/test_kinds.py::test_greenlet_that_another_one_overtakes_keeps_the_owners",
    ),
    Fault(
        "every greenlet goes on with what a thread held before a patch",
        "_lease/owner.py",
        "former.owner if _is_main_greenlet() else Owner()",
        "former.owner",
        _HELD,
    ),
    Fault(
        "holder forgets at a patch what it holds",
        "_lease/owner.py",
        "former.owner if _is_main_greenlet() else Owner()",
        "Owner()",
        _HELD,
    ),
    Fault(
        "connection from before a patch is kept",
        "_transport/threads/server.py",
        "        self._drop(self.connection)\n\n    def resume",
        "\n    def resume",
        "tests/unit/transport/test_kinds.py::test_connection_from_before_a_patch_is_closed",
    ),
    Fault(
        "lock that is held across a patch is renewed no more",
        "_renewal/threads.py",
        "next_at() is not None:\n            self._look_by(0.0)\n",
        "next_at() is not None:\n            pass\n",
        f"{_TESTS}lock_that_is_held_across_the_patch_is_renewed",
    ),
    Fault(
        "greenlet of eventlet is woken again after a wait for several sockets",
        "_pipe/threads_py.py",
        "                time.sleep(0)\n",
        "                pass\n",
        "tests/pipe/test_threads.py::test_greenlet_that_several_sockets_wake_is_woken_once",
    ),
)
