"""The cost of waking threads: each thread waits for one other thread twice a pair.

There is no server, no socket and no lock in it. When threads share a connection, one thread reads for all, and each
operation of another thread is a wait for that one. So this is about the limit for such a client, in this interpreter
and on this machine.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType

from bench.measuring.costs import Meter
from bench.measuring.rounds import Entrant, Sample, Scene
from bench.workloads import threads

NAME = "wake-ups"
"""Its name in `--only`."""


class _Desk:
    """A thread that answers other threads.

    `_asking` is changed by atomic methods of deque alone. The asking threads release `_bell`, the answering thread
    acquires it.
    """

    def __init__(self) -> None:
        self._asking: deque[threading.Lock] = deque()
        self._bell = threading.Lock()
        self._is_open = True

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        thread = threading.Thread(target=self._answer)
        thread.start()
        try:
            yield
        finally:
            self._is_open = False
            self._ring()
            thread.join()

    def ask(self, answered: threading.Lock) -> None:
        """Wait until the answering thread releases this lock."""
        self._asking.append(answered)
        self._ring()
        answered.acquire()

    def _ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is released already
            self._bell.release()

    def _answer(self) -> None:
        self._bell.acquire()
        while self._is_open:
            self._bell.acquire()
            while self._asking:
                self._asking.popleft().release()


class _Turn:
    """Takes the place of a lock: each of its two operations is one question."""

    def __init__(self, desk: _Desk) -> None:
        self._desk = desk
        self._answered = threading.Lock()
        self._answered.acquire()

    def acquire(self, *, blocking: bool = True) -> bool:
        self._desk.ask(self._answered)
        return blocking

    def release(self) -> None:
        self._desk.ask(self._answered)

    def __enter__(self) -> object:
        return self.acquire()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        self.release()


def entrants_of(scene: Scene, counts: Sequence[int] = threads.COUNTS) -> list[Entrant]:
    """Make a row for each number of threads."""

    def entrant(count: int) -> Entrant:
        def measure(seconds: float) -> Sample:
            return _measure(scene, count, seconds)

        return Entrant(NAME, NAME, f"{count} threads", measure, lambda: None, count)

    return [entrant(count) for count in counts]


def _measure(scene: Scene, count: int, seconds: float) -> Sample:
    meter = Meter(scene.witness)
    desk = _Desk()
    with desk.open():
        turns = threads.take_turns([_Turn(desk) for _ in range(count)], seconds, meter.start)
        client_cpu_us, _ = meter.read(turns.pairs)
    return Sample(
        turns.pairs_per_s, turns.latencies_s, 0, client_cpu_us, acquires_s=turns.acquires_s, pairs_s=turns.pairs_s
    )
