"""The faults of the simulations: connections, processes, the server, operators, and a foreign holder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

from tests.simulation.process import Process
from tests.simulation.waiters import KEY, BatchLease
from tests.simulation.world import World

FAULTS = (
    "cut",
    "cut",
    "unsent",
    "deaf",
    "kill",
    "freeze",
    "cancel",
    "cancel",
    "cancel",
    "delete",
    "flush",
    "flush scripts",
    "restart",
    "full",
    "deny",
)
_ON_CONNECTIONS = ("cut", "unsent", "deaf")
"""Those that happen to one connection of a process alone."""

_LONGEST_BLOCK = 8000
"""How long a loop is blocked at most, in thousandths of a ttl."""

_DENIALS = (
    frozenset({"EVAL", "EVALSHA"}),
    frozenset({"PUBLISH"}),
    frozenset({"CLIENT"}),
    frozenset({"SUBSCRIBE", "SSUBSCRIBE"}),
    frozenset({"HELLO"}),
    frozenset({"COMMAND"}),
    frozenset({"EVAL", "EVALSHA", "CLIENT"}),
)


class Stage(Protocol):
    """The simulation in which the faults happen."""

    rng: random.Random
    world: World
    rival: BatchLease | None
    hold_s: float
    interval_s: float
    processes: list[Process]

    @property
    def ttl_ms(self) -> int | None:
        """The locks' ttl."""

    @property
    def waiters(self) -> Sequence[Any]:
        """The callers that may be cancelled."""

    def look(self) -> None:
        """Note that the server's keys may have changed."""

    def check_exclusion(self, new: BatchLease) -> None:
        """Check exclusion when a holder begins to hold."""


class Faults:
    """The faults of one story.

    Args:
        simulation: the story.
        kinds: what may go wrong.
        has_rival: whether there may be a foreign holder.

    Attributes:
        end_us: when the last one is over.
        deleted_us: when the lock was last deleted from outside, by the server's clock.
    """

    def __init__(self, simulation: Stage, kinds: Sequence[str] = FAULTS, has_rival: bool = True) -> None:
        self._kinds = kinds
        self._has_rival = has_rival
        self.end_us = 0
        self.deleted_us = -1
        self._simulation = simulation
        self._random = simulation.rng
        self._world = simulation.world
        self._model = simulation.world.model
        self._rival_rounds = 0
        self._on_processes = {
            "cut": self._cut,
            "unsent": self._lose_unsent,
            "deaf": self._deafen,
            "kill": self._kill,
            "freeze": self._freeze,
            "deny": self._deny,
            "block": self._block,
        }
        self._on_the_server = {
            "delete": lambda: self._model.remove(KEY),
            "take": lambda: self._model.put(KEY, b"operator", 100),
            "flush": self._model.flush,
            "flush scripts": self._model.flush_scripts,
            "restart": self._restart,
            "full": self._fill,
        }

    def plan(self, count: int) -> None:
        """Schedule at most so many faults, and perhaps a foreign holder."""
        rng = self._random
        span_us = rng.choice((5000, 30_000, 200_000))
        for _ in range(1 + int(count * rng.random())):
            at_us = 1000 + int(span_us * rng.random())
            self._world.at(at_us, None, self._happen, rng.choice(self._kinds))
            self.end_us = max(self.end_us, at_us)
        if self._has_rival and rng.random() < 0.2:
            self._rival_rounds = 1 + int(3 * rng.random())
            self._world.at(1000 + int(span_us * rng.random()), None, self._rival_tries)

    def plan_blocks(self, rng: random.Random) -> None:
        """Schedule up to three times at which a loop is blocked."""
        for _ in range(1 + int(3 * rng.random())):
            at_us = 1000 + int(4000 * (self._simulation.ttl_ms or 0) * rng.random())
            self._world.at(at_us, None, self._happen, "block")
            self.end_us = max(self.end_us, at_us + _LONGEST_BLOCK * (self._simulation.ttl_ms or 0))

    def denial(self) -> frozenset[str]:
        """The commands that a user may not use."""
        denied = self._random.choice(_DENIALS)
        # A user without scripts on a server without commands in their place cannot release at all.
        return denied if self._model.has & {"DELIFEQ", "DELEX"} or "EVAL" not in denied else frozenset()

    def operate(self, name: str) -> None:
        """Let something happen to the server."""
        self._world.changed = True
        self._world.set_server_clock()
        self._on_the_server[name]()
        if name in ("delete", "take", "flush", "restart"):
            self.deleted_us = self._model.now_us
            self._simulation.look()

    def _happen(self, name: str) -> None:
        process = self._random.choice(self._simulation.processes)
        if name not in _ON_CONNECTIONS:
            process = process.parts[0]
        self._world.tell("FAULT:", name, process.name if name in self._on_processes else "")
        delay_us = int(self._world.slow_us * self._random.random()) if self._random.random() < 0.5 else 0
        if name in self._on_processes:
            self._on_processes[name](process, delay_us)
        elif name in self._on_the_server:
            self.operate(name)
        else:
            waiter = self._random.choice(self._simulation.waiters)
            if not waiter.process.dead and waiter.state in ("acquiring", "waiting", "releasing"):
                waiter.task.cancel()

    # ---- what happens to a process ----

    def _cut(self, process: Process, delay_us: int) -> None:
        """Cut the connection: the server notices first, and its replies are lost, or the client does."""
        connection = process.connection
        if connection is None:
            return
        if self._random.random() < 0.5:
            connection.vanish()
            self._world.after(delay_us, process, process.drop, connection)
        else:
            process.drop(connection)

    @staticmethod
    def _lose_unsent(process: Process, _delay_us: int) -> None:
        """Let the next request find the connection broken before it leaves."""
        process.loses_next = True

    def _deafen(self, process: Process, _delay_us: int) -> None:
        """Drop pushes on the way, perhaps on the next connections too."""
        process.deaf = self._random.random() < 0.5
        if process.connection is not None:
            process.connection.session.deaf = True

    def _kill(self, process: Process, delay_us: int) -> None:
        """Kill the process; sometimes its connection stays open forever."""
        process.dead = self._world.changed = True
        for connection in [each for part in process.parts for each in part.connections]:
            if self._random.random() < 0.7:
                self._world.after(delay_us, None, connection.vanish)

    def _freeze(self, process: Process, _delay_us: int) -> None:
        """Stop the process for a while; what comes meanwhile waits for it."""
        longest_us = self._random.choice((1000, 50_000, 500_000, 3_000_000))
        until_us = self._world.now_us + int(longest_us * self._random.random())
        process.stop(until_us, is_busy=False)
        self.end_us = max(self.end_us, process.frozen_until_us)

    def _block(self, process: Process, _delay_us: int) -> None:
        """Let the loop of a process run nothing for a while; its renewing thread goes on."""
        longest_us = self._random.choice((500, 2000, 5000, _LONGEST_BLOCK)) * (self._simulation.ttl_ms or 0)
        process.stop(self._world.now_us + int(longest_us * self._random.random()), is_busy=True)
        self.end_us = max(self.end_us, process.busy_until_us)

    def _deny(self, process: Process, _delay_us: int) -> None:
        """Take rights from the user of the process."""
        process.denied = self.denial()
        process.was_barred = process.was_barred or "EVAL" in process.denied
        if process.connection is not None:
            process.connection.session.denied = process.denied

    # ---- what happens to the server ----

    def _restart(self) -> None:
        """Restart the server without its data."""
        self._model.flush()
        self._model.flush_scripts()
        self._world.server_is_down = True
        for process in self._simulation.processes:
            for connection in list(process.connections):
                connection.vanish()
                self._world.after(self._world.delay_us(), process, process.drop, connection)
        down_us = int(self._world.slow_us * self._random.random())
        self._world.after(down_us, None, setattr, self._world, "server_is_down", False)

    def _fill(self) -> None:
        """Let the server have no memory left for a while."""
        self._model.full = True
        self._world.after(int(0.1e6 * self._random.random()), None, setattr, self._model, "full", False)

    # ---- a lock of redis-py's ----

    def _rival_tries(self) -> None:
        """Let a rival in a process of its own try to acquire, without the contended flag and the queue."""
        simulation, world, rng = self._simulation, self._world, self._random
        world.changed = True
        world.set_server_clock()
        ttl_ms = simulation.ttl_ms or 500
        entry = self._model.entry(KEY)
        if simulation.rival is not None:
            if entry is not None and entry.value == simulation.rival.token:
                self._model.remove(KEY)
            world.tell("the rival releases")
            simulation.rival = None
            simulation.look()
        elif entry is None:
            token = b"%032x" % (0xF000 + self._rival_rounds)
            self._model.put(KEY, token, ttl_ms)
            world.tell("the rival acquires")
            simulation.look()
            simulation.rival = BatchLease("the rival", token, self._model.now_us, world.now_us + ttl_ms * 1000)
            simulation.check_exclusion(simulation.rival)
            self._rival_rounds -= 1
            world.after(int(1e6 * simulation.hold_s * rng.random()), None, self._rival_tries)
            return
        if self._rival_rounds:
            world.after(int(1e6 * simulation.interval_s * (0.5 + rng.random())), None, self._rival_tries)
