"""How the command line connects: by `--url`, or by what the environment says.

Passwords come from the URL or the environment, and stand in no message.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.connection import SSLConnection, parse_url
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from redislock_fast._cli.exits import CommandError

if TYPE_CHECKING:
    from redislock_fast._cli.parsing import CommandParser

    Client: TypeAlias = "redis.Redis | redis.RedisCluster"

__all__ = ["add_connection", "add_query", "client_of", "servers_of"]

_LOCAL = "redis://localhost:6379/0"
_SENTINEL_PORT = 26379

_FORMS = (
    "it must be like redis://host:6379/0, rediss://..., unix:///path, redis+cluster://host:6379, or "
    "redis+sentinel://host:26379,host2:26379/service/0"
)

_CREDENTIALS = {"REDISLOCK_USERNAME": "username", "REDISLOCK_PASSWORD": "password"}
_TLS = {"REDISLOCK_CA_CERTS": "ssl_ca_certs", "REDISLOCK_CERTFILE": "ssl_certfile", "REDISLOCK_KEYFILE": "ssl_keyfile"}
"""Which setting of redis-py each variable of the environment is. It counts more than the URL."""

_PATIENCE = {"socket_timeout": 5.0, "socket_connect_timeout": 5.0}
"""In seconds, unless the URL says otherwise: else a frozen server would hang the command."""


def add_connection(parser: CommandParser) -> None:
    """Give a command the options that say which server it talks to. Its `usage_code` is set before."""
    parser.add_argument("--url", help=f"the server's URL; by default $REDISLOCK_URL, or {_LOCAL}")
    parser.set_defaults(usage_code=parser.usage_code)


def add_query(
    commands: Any, command: str, about: str, run: Callable[[argparse.Namespace], int], name: str | None = None
) -> CommandParser:
    """Add a command that asks a server, and prints the answer in words or as JSON.

    Args:
        commands: the parsers of commands.
        command: its name.
        about: its help.
        run: runs it.
        name: what its argument NAME is; None where it has none.
    """
    parser: CommandParser = commands.add_parser(command, help=about)
    add_connection(parser)
    if name is not None:
        parser.add_argument("name", metavar="NAME", help=name)
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line")
    parser.set_defaults(command=run)
    return parser


def client_of(arguments: argparse.Namespace) -> Client:
    """The client for the options of `add_connection`. That of a cluster has connected, others have not.

    Raises:
        CommandError: the URL is wrong. The message has no secret in it.
        redis.exceptions.RedisClusterException: no node of the cluster answers.
    """
    url = arguments.url or os.environ.get("REDISLOCK_URL") or _LOCAL
    scheme, _, rest = url.partition("://")
    encryption, _, topology = scheme.partition("+")
    try:
        if topology == "sentinel":
            return _behind_sentinels(encryption, rest)
        if topology not in ("", "cluster"):
            raise ValueError("an unknown topology")
        settings = _settings(f"{encryption}://{rest}")
        return _cluster(settings) if topology else redis.Redis.from_pool(redis.ConnectionPool(**settings))
    except (ValueError, OverflowError, TypeError, LookupError):  # which may quote the URL
        fault = _wrong_option(encryption, rest.partition("?")[2]) or _FORMS
        raise CommandError(f"the URL is wrong: {fault}", arguments.usage_code) from None


def _wrong_option(scheme: str, query: str) -> str | None:
    """What is wrong with the first wrong option of a URL, by its name; None where none is, or a password may be there.

    Args:
        scheme: of the URL, without the topology.
        query: what stands after the URL's first "?".
    """
    for option in [] if "@" in query else [("", ""), *parse_qsl(query)]:
        name = option[0]
        try:
            _settings(f"{scheme}://localhost?{urlencode([option] if name else [])}")
        except TypeError:
            return f"there is no option {name!r}"
        except (ValueError, OverflowError, LookupError):
            return f"its option {name!r} cannot have this value" if name else None
    return None


def servers_of(client: Client) -> list[redis.Redis]:
    """A client of each server that has locks: the server, or each primary of the cluster."""
    if not isinstance(client, redis.RedisCluster):
        return [client]
    return [client.get_redis_connection(node) for node in client.get_primaries()]  # type: ignore[no-untyped-call]


def _settings(url: str) -> dict[str, Any]:
    """The settings of connections to the server of a URL.

    Raises:
        ValueError: it is no URL of a server.
        OverflowError: it has a time that is too long.
        TypeError: it has an option that connections do not have.
        LookupError: it names an encoding that does not exist.
    """
    told: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    settings: dict[str, Any] = {**_PATIENCE, **told, **_credentials(_CREDENTIALS)}
    kind = settings.setdefault("connection_class", redis.Connection)
    if kind is SSLConnection:
        settings.update(_from_environment(_TLS))
    settings["retry"] = Retry(ExponentialBackoff(cap=0.5, base=0.05), 3)
    settings["decode_responses"] = False  # the commands read bytes, whatever a URL that programs share says
    _checked_host(settings.get("host"))
    with socket.socket() as probe:
        for name in _PATIENCE:
            probe.settimeout(settings[name])
    try:
        connection: Any = kind(**{name: value for name, value in settings.items() if name != "connection_class"})
    except RedisError as error:
        raise ValueError(str(error)) from None
    connection.encoder.encode("a")
    return settings


def _checked_host(host: str | None) -> str | None:
    """The host, which the resolver takes.

    Raises:
        ValueError: it does not.
    """
    (host or "").encode("idna")
    return host


def _from_environment(names: dict[str, str]) -> dict[str, str]:
    return {setting: os.environ[name] for name, setting in names.items() if os.environ.get(name)}


def _credentials(names: dict[str, str]) -> dict[str, bytes]:
    """Those of the environment, of any bytes, as the server takes them."""
    return {setting: os.fsencode(value) for setting, value in _from_environment(names).items()}


def _cluster(settings: dict[str, Any]) -> redis.RedisCluster:
    """The client of a cluster.

    Raises:
        ValueError: there is no host, or a unix socket in its place.
    """
    if "host" not in settings:
        raise ValueError("no host")
    settings.pop("db", None)  # a cluster has no other than 0
    encrypted = settings.pop("connection_class") is SSLConnection
    return redis.RedisCluster(ssl=encrypted, **settings)


def _behind_sentinels(encryption: str, rest: str) -> redis.Redis:
    """The client of the primary that sentinels name.

    Raises:
        ValueError: no service, or a wrong address.
    """
    place, _, options = rest.partition("?")
    address, _, path = place.partition("/")
    credentials, at, hosts = address.rpartition("@")
    service, _, database = path.partition("/")
    if not service or not hosts:
        raise ValueError("no service")
    settings = _settings(f"{encryption}://{credentials}{at}localhost/{int(database or 0)}?{options}")
    encrypted = settings.pop("connection_class") is SSLConnection
    settings.pop("host")
    own = {name: value for name, value in settings.items() if name not in ("db", "username", "password")}
    own.update(_credentials({"REDISLOCK_SENTINEL_PASSWORD": "password"}), ssl=encrypted)
    own["retry"] = Retry(NoBackoff(), 0)  # they are asked again for each connection
    watchers = [urlsplit(f"//{host}") for host in hosts.split(",")]
    addresses = [(_checked_host(watcher.hostname), watcher.port or _SENTINEL_PORT) for watcher in watchers]
    sentinel: Any = Sentinel(addresses, sentinel_kwargs=own)  # type: ignore[no-untyped-call]
    primary: redis.Redis = sentinel.master_for(service, ssl=encrypted, **settings)
    return primary
