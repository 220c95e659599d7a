"""`redislock doctor`: how locks and semaphores will work on this server, and what its user must be granted for more."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from redislock_fast._cli.connecting import add_query, client_of
from redislock_fast._cli.exits import Exit, say
from redislock_fast._cli.printing import print_json, table
from redislock_fast._cli.probing import FENCE, PERMITS, QUEUE, SCRIPTS, SEEN, TIDY, Probes
from redislock_fast._pipe.impl import implementation
from redislock_fast._version import __version__

__all__ = ["add_to"]

_REFUSED = "refused"
_PREFIX = "redislock_fast:doctor:"


@dataclass(frozen=True)
class Feature:
    """How one part of the locks works.

    Attributes:
        name: the part.
        mode: how it works here.
        best: how it would work with all that this server has.
        missing: the ACL rules that it lacks.
    """

    name: str
    mode: str
    best: str
    missing: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing could be better."""
        return self.mode == self.best and not self.missing


def add_to(commands: Any) -> None:
    """Add the command to the parsers of commands."""
    about = "tell how locks will work on this server, and what its user must be granted"
    parser = add_query(commands, "doctor", about, _examine)
    parser.add_argument(
        "--prefix",
        default=_PREFIX,
        help="how the names of your locks begin: rights are tried on such a name (default: %(default)s)",
    )


def _examine(arguments: argparse.Namespace) -> int:
    client: Any = client_of(arguments)
    probes = Probes(client, os.fsencode(arguments.prefix))
    features = list(_features(probes))
    rules = sorted({rule for feature in features for rule in feature.missing})
    user = _user(probes) or os.fsdecode(client.get_connection_kwargs().get("username") or "") or None
    report = {
        "server": _server(probes),
        "user": user,
        "client": {"version": __version__, "implementation": implementation},
        "round_trip_ms": round(probes.round_trip_ms(), 3),
        "features": [{**asdict(feature), "ok": feature.ok} for feature in features],
        "grant": " ".join(["ACL SETUSER", user or "USER", *rules]) if rules else None,
        "ok": all(feature.ok for feature in features),
    }
    if arguments.json:
        print_json(report)
    else:
        _print(report, features)
    if arguments.prefix == _PREFIX and any(rule.startswith("~") for rule in rules):
        say(f"rights were tried on names like {_PREFIX}*: --prefix says how those of your locks begin")
    if probes.guessed:
        guessed = " ".join(sorted(probes.guessed))
        say(f"not tried, since commands are denied: {guessed}. The user may have it by ~* or &*: then leave it out")
    return Exit.OK if report["ok"] else Exit.FAILED


def _features(probes: Probes) -> Iterator[Feature]:
    """The features of locks, each with the mode in which it would work. The first mode is the best."""
    server = probes.capabilities
    sets = "SET NX GET" if server.set_get else "SET NX"
    yield _feature(probes, "acquire", [(sets, ("set", "get")), ("SET NX", ("set",))])
    asked = () if probes.allows("command|info") else ("command|info",)
    unknown = [("native where there is one", asked)] if asked and probes.native is None else []
    native = [] if probes.native is None else [(probes.native.decode(), (*asked, probes.native.decode().lower()))]
    yield _feature(probes, "release", [*unknown, *native, ("script", (*SCRIPTS, "get", "del"))])
    native = [] if probes.native is None else [("SET IFEQ", (*asked, "set"))]
    yield _feature(probes, "renewal", [*unknown, *native, ("script", (*SCRIPTS, "get", "pexpire"))])
    by_reading = [] if probes.native is None else [("GET, PTTL, SET IFEQ", (*asked, "get", "pttl", "set"))]
    yield _feature(probes, "extend", [("script", (*SCRIPTS, "get", "pttl", "pexpire")), *by_reading])
    yield _waiting(probes)
    yield _feature(probes, "semaphores", [("scripts", PERMITS)])
    yield _feature(probes, "fencing", [("numbers", FENCE)])
    yield _feature(probes, "linger", [("on", ("hello", "subscribe")), ("off", ())])
    yield _feature(probes, "holders", [("all known", SEEN), ("partly known", ())])
    yield _feature(probes, "tidying up", [("at once", TIDY), ("by ttl", ())])
    yield _feature(probes, "replicas", [("WAIT", ("wait",))])
    yield _memory(probes)


def _feature(probes: Probes, name: str, modes: list[tuple[str, tuple[str, ...]]]) -> Feature:
    """A feature that works in the first of these modes whose probes have all succeeded."""
    best, needs = modes[0]
    mode = next((mode for mode, names in modes if probes.allows(*names)), _REFUSED)
    return Feature(name, mode, best, _missing(probes, needs))


def _missing(probes: Probes, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(rule for name in names for rule in probes.rules.get(name, ())))


def _waiting(probes: Probes) -> Feature:
    tracks = probes.capabilities.push and probes.allows("client|tracking", "client|caching", "get")
    mode = "queue" if probes.hands_over else "tracking" if tracks else "polling"
    return Feature("waiting", mode, "queue", _missing(probes, QUEUE))


def _memory(probes: Probes) -> Feature:
    """Whether the server may evict locks when its memory is full."""
    told = _info(probes, b"memory")
    policy = told.get("maxmemory_policy", "unknown")
    evicts = told.get("maxmemory") != "0" and policy.startswith("allkeys")
    return Feature("memory", policy, "noeviction" if evicts else policy)


def _server(probes: Probes) -> dict[str, str | None]:
    """Name, version and topology of the server, as far as it says."""
    told = _info(probes, b"server") if not probes.hello else {}
    names = {"name": b"server", "version": b"version", "mode": b"mode"}
    fields = {"version": "redis_version", "mode": "redis_mode"}
    by_hello = {name: probes.hello[field].decode() for name, field in names.items() if field in probes.hello}
    return {name: by_hello.get(name) or told.get(fields.get(name, "")) for name in names}


def _info(probes: Probes, section: bytes) -> dict[str, str]:
    """The fields of `INFO`; none where it is not allowed."""
    reply = probes.ask(b"INFO", section)
    lines = reply.decode(errors="replace").splitlines() if isinstance(reply, bytes) else []
    return dict(line.partition(":")[::2] for line in lines if not line.startswith("#"))


def _user(probes: Probes) -> str | None:
    reply = probes.ask(b"ACL", b"WHOAMI")
    return reply.decode(errors="replace") if isinstance(reply, bytes) else None


def _print(report: dict[str, Any], features: list[Feature]) -> None:
    server, client = report["server"], report["client"]
    print(f"server      {server['name'] or '?'} {server['version'] or '?'}, {server['mode'] or '?'}")
    print(f"user        {report['user'] or '?'}")
    print(f"client      redislock_fast {client['version']}, {client['implementation']}")
    print(f"round trip  {report['round_trip_ms']} ms\n")
    rows = [(one.name, one.mode, "" if one.ok else f"could be: {one.best}") for one in features]
    print(table(("FEATURE", "MODE", ""), rows))
    if report["grant"] is not None:
        print(f"\nfor all of this: {report['grant']}")
