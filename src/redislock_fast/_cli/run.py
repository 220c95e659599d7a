"""`redislock run`: holds a lock, or a permit of a semaphore, while a command runs. See `docs/reference/cli.md`."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError, ResponseError

from redislock_fast import Lock, Permit, Semaphore
from redislock_fast._cli.child import Child
from redislock_fast._cli.connecting import add_connection, client_of
from redislock_fast._cli.exits import CommandError, Exit, say
from redislock_fast._cli.guard import Guard
from redislock_fast._cli.holding import (
    acquired,
    add_command,
    add_ttl,
    environment_of,
    exit_code,
    finish,
    prepare,
    seconds,
    time_kept,
    ttl,
    words_of,
)
from redislock_fast._cli.parsing import CommandParser
from redislock_fast._cli.scanning import positive_int
from redislock_fast._cli.signals import Interrupted, Signals
from redislock_fast._procedures.once import mark_done, read_done
from redislock_fast._protocol.commands import Reacquire
from redislock_fast._queue.reporting import described, name_holders, read_report
from redislock_fast._transport.greeting import introduce_as
from redislock_fast._transport.threads.driver import drive, transport_of
from redislock_fast._util.times import clock, positive_ms

if TYPE_CHECKING:
    from redislock_fast._cli.connecting import Client

__all__ = ["add_to"]

_TTL_S = 30.0
_REPORT_LIMIT_S = 3.0


def add_to(commands: Any) -> None:
    """Add the command to the parsers of commands."""
    parser: CommandParser = commands.add_parser(
        "run",
        help="run a program while holding a lock, or one of several permits",
        description="Run a program while holding a lock, which is renewed meanwhile. The program is ended if the lock"
        " is lost. With --limit, several may run at once.",
    )
    prepare(parser, "run")
    parser.add_argument(
        "--limit",
        type=positive_int,
        metavar="N",
        help="let N programs run at once: hold a permit of the semaphore NAME instead of a lock",
    )
    wait = parser.add_mutually_exclusive_group()
    wait.add_argument("-n", dest="wait_s", action="store_const", const=0.0, help="do not wait for the lock")
    wait.add_argument("-w", dest="wait_s", type=seconds, metavar="SECONDS", help="wait so long at most")
    add_ttl(parser, _TTL_S)
    parser.add_argument(
        "--at-least",
        dest="at_least_s",
        type=time_kept,
        default=0.0,
        metavar="SECONDS",
        help="keep the lock so long, also if the program ends earlier",
    )
    parser.add_argument(
        "--once-done",
        dest="done_for_s",
        type=ttl,
        metavar="SECONDS",
        help="run the program only if it has not ended with 0 by another `run` in the last SECONDS; wait for that",
    )
    parser.add_argument(
        "--on-lost",
        choices=["kill", "warn"],
        default="kill",
        help="what to do if the lock is lost: end the program (the default), or only say so",
    )
    _add_refusal(parser)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="say how long it took to acquire the lock, and what is run"
    )
    add_connection(parser)
    add_command(parser, "the lock, or the semaphore")
    parser.set_defaults(command=_run)


def _add_refusal(parser: CommandParser) -> None:
    """Add what to exit with where the lock was not acquired."""
    refusal = parser.add_mutually_exclusive_group()
    refusal.add_argument(
        "-E",
        dest="refusal_code",
        type=exit_code,
        default=int(Exit.NOT_ACQUIRED),
        metavar="CODE",
        help="what to exit with where the lock was not acquired (default: %(default)d)",
    )
    refusal.add_argument(
        "--skip-ok",
        dest="refusal_code",
        action="store_const",
        const=int(Exit.OK),
        help="exit with 0 where the lock was not acquired",
    )


def _run(arguments: argparse.Namespace) -> int:
    words = words_of(arguments)
    if arguments.done_for_s is not None and (arguments.limit is not None or arguments.at_least_s):
        raise CommandError("--once-done goes with neither --limit nor --at-least")
    client = client_of(arguments)
    introduce_as(f"redislock:{PurePath(words[0]).name}")
    began = clock()
    if _is_done(client, arguments):  # before signals are caught: they end this, too, if the server is silent
        return Exit.OK
    signals = Signals()
    lock_name: str = arguments.name
    what = f"the lock {lock_name!r}" if arguments.limit is None else f"the permit of the semaphore {lock_name!r}"
    guard = Guard(what, signals, arguments.ttl_s, kills=arguments.on_lost == "kill")
    try:
        lock = _acquired(client, arguments, signals, guard)
    except Interrupted as interrupt:
        return 128 + interrupt.number
    if lock is None:
        refusal = _refusal if arguments.limit is None else _refusal_of_permit
        raise CommandError(refusal(client, lock_name), arguments.refusal_code)
    keep_until = clock() + arguments.at_least_s
    try:
        if _is_done(client, arguments):  # it was done meanwhile
            finish(lock, what, lock.release)
            return Exit.OK
        if arguments.verbose:
            say(f"acquired {what} after {clock() - began:.3f} s, running {words[0]!r}")
        child = Child(words, environment_of(lock_name, fence=lock.fence if isinstance(lock, Lock) else None))
    except (CommandError, RedisError):
        finish(lock, what, lock.release)
        raise
    code = guard.run(lock, child)
    child.forget()
    if code == 0 and isinstance(lock, Lock) and arguments.done_for_s is not None and not guard.has_ended_it:
        _note_done(client, lock, arguments.done_for_s)
    if guard.loss is None:
        finish(lock, what, lambda: _give_back(client, lock, keep_until))
    if guard.has_ended_it:
        cause = "could not be renewed in time" if guard.loss is None else f"was lost ({guard.loss})"
        raise CommandError(f"the command was ended, since {what} {cause}", Exit.LOST)
    return code


def _acquired(client: Client, arguments: argparse.Namespace, signals: Signals, guard: Guard) -> Lock | Permit | None:
    """The held lock, with a fence where the server allows that, or the permit; None where others hold it."""
    if arguments.limit is not None:
        return _acquired_permit(client, arguments, signals, guard)
    try:
        return _acquired_with(True, client, arguments, signals, guard)
    except ResponseError:  # fencing needs scripts
        return _acquired_with(False, client, arguments, signals, guard)


def _acquired_with(
    fencing: bool, client: Client, arguments: argparse.Namespace, signals: Signals, guard: Guard
) -> Lock | None:
    terms = _terms(arguments, guard)
    lock = Lock(client, arguments.name, thread_local=False, auto_renew=True, fencing=fencing, **terms)
    return lock if acquired(lock, f"the lock {lock.name!r}", signals) else None


def _acquired_permit(client: Client, arguments: argparse.Namespace, signals: Signals, guard: Guard) -> Permit | None:
    semaphore = Semaphore(client, arguments.name, arguments.limit, **_terms(arguments, guard))
    try:
        with signals.interrupting():
            return semaphore.acquire()
    except Interrupted:
        with contextlib.suppress(RedisError):  # mostly, it has none
            semaphore.release()
        raise


def _terms(arguments: argparse.Namespace, guard: Guard) -> dict[str, Any]:
    """The parameters that a lock and a semaphore share."""
    waits = {"blocking": arguments.wait_s != 0, "blocking_timeout": arguments.wait_s or None}
    return {"timeout": arguments.ttl_s, "on_lost": guard.note_loss, **waits}


def _refusal_of_permit(client: Client, name: str) -> str:
    """Who has the permits, as far as the server tells."""
    transport = transport_of(client)
    try:
        holders = drive(transport, name_holders(transport.encoding.key_of(name), _REPORT_LIMIT_S))
    except Exception:
        holders = "others"  # the refusal is certain, and has its exit code
    return f"no permit of the semaphore {name!r} was free: it is held by {holders}"


def _refusal(client: Client, lock_name: str) -> str:
    """Who has the lock, and since when, as far as the server tells."""
    transport = transport_of(client)
    try:
        report = drive(transport, read_report(transport.encoding.key_of(lock_name), _REPORT_LIMIT_S))
    except Exception:
        return f"the lock {lock_name!r} is another's"  # the refusal is certain, and has its exit code
    if report.holder is None:
        return f"the lock {lock_name!r} was another's, and is free by now"
    text = f"the lock {lock_name!r} is held by {described(report.holder)}"
    if report.holder.process is not None:
        since = time.localtime(time.time() - report.holder.process.connected_s)
        text += f", connected since {time.strftime('%Y-%m-%d %H:%M:%S', since)}"
    return text + f" (token id {report.holder.token_id or 'none: the key is no lock'})"


def _is_done(client: Client, arguments: argparse.Namespace) -> bool:
    """Whether the command is not to be run, since another run has ended not long ago."""
    if arguments.done_for_s is None:
        return False
    transport = transport_of(client)
    is_done: bool = drive(transport, read_done(transport.encoding.key_of(arguments.name)))
    if is_done and arguments.verbose:
        say(f"{arguments.name!r} is done: the command is not run")
    return is_done


def _note_done(client: Client, lock: Lock, done_for_s: float) -> None:
    """Note that the command has done it, while the lock is still held. Trouble is reported."""
    marking = mark_done(lock, positive_ms(done_for_s, "done_for"))
    finish(lock, f"{lock.name!r}", lambda: drive(transport_of(client), marking), "is done, but that could not be noted")


def _give_back(client: Client, lock: Lock | Permit, keep_until: float) -> None:
    """Release the lock, or leave it to its ttl where it is to be kept for longer."""
    rest_s = keep_until - clock()
    if rest_s <= 0:
        lock.release()
        return
    handle = lock.detach()  # not renewed any more
    if isinstance(lock, Lock):
        Lock.attach(client, handle).extend(rest_s, replace_ttl=True)
    else:
        transport = transport_of(client)
        transport.execute(Reacquire(transport.encoding.key_of(lock.name), handle.token, positive_ms(rest_s, "rest")))
