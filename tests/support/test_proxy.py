"""Tests of the fault proxy before a real server: its counts, the messages that it drops and holds."""

from __future__ import annotations

import pytest
import redis

from tests.conftest import Connect
from tests.support.helpers import once, start
from tests.support.proxy import Proxy, command_name, message_end


@pytest.fixture
def proxied(proxy: Proxy, connect: Connect) -> redis.Redis:
    """A client behind the proxy that never repeats a request."""
    return connect(proxy.port, retry=once(), protocol=3)  # which the proxy knows messages by


@pytest.mark.parametrize(
    "message",
    [
        b"+OK\r\n",
        b"-ERR no\r\n",
        b":12\r\n",
        b"$3\r\na\r\n\r\n",
        b"$-1\r\n",
        b"*0\r\n",
        b"*-1\r\n",
        b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n",
        b"%1\r\n+a\r\n:1\r\n",
        b"~1\r\n_\r\n",
        b">2\r\n+invalidate\r\n*1\r\n$1\r\nk\r\n",
        b"|1\r\n+ttl\r\n:1\r\n+OK\r\n",
        b"=5\r\ntxt:a\r\n",
        b"#t\r\n",
        b",1.5\r\n",
    ],
)
def test_message_end_finds_whole_messages_only(message: bytes) -> None:
    assert len(message) == message_end(message + b"+NEXT\r\n")
    assert all(message_end(message[:cut]) is None for cut in range(len(message)))


def test_command_name_is_in_capitals() -> None:
    assert "GET" == command_name(b"*2\r\n$3\r\nget\r\n$1\r\nk\r\n")


def test_passes_and_counts_requests_and_replies(proxy: Proxy, proxied: redis.Redis) -> None:
    proxied.set("k", b"a\r\nb")
    assert b"a\r\nb" == proxied.get("k")
    proxy.wait_for_reply("GET")
    assert (1, 1) == (proxy.requests["SET"], proxy.requests["GET"])
    assert (1, 1) == (proxy.replies["SET"], proxy.replies["GET"])
    assert not proxy.dropped.is_set()


def test_drop_reply_executes_the_command_and_closes(proxy: Proxy, proxied: redis.Redis, client: redis.Redis) -> None:
    proxied.ping()
    proxy.drop_reply("INCRBY", nth=2)
    assert 1 == proxied.incr("k")
    with pytest.raises(redis.ConnectionError):
        proxied.incr("k")
    assert proxy.dropped.wait(5)
    assert b"2" == client.get("k")
    assert 3 == proxied.incr("k")


def test_drop_request_never_reaches_the_server(proxy: Proxy, proxied: redis.Redis, client: redis.Redis) -> None:
    proxied.ping()
    proxy.drop_request("INCRBY")
    with pytest.raises(redis.ConnectionError):
        proxied.incr("k")
    assert proxy.dropped.is_set()
    assert client.get("k") is None


def test_faults_strike_any_command_and_may_pass_on_a_share(
    proxy: Proxy, proxied: redis.Redis, client: redis.Redis
) -> None:
    proxied.ping()
    proxy.drop_reply(nth=2, share=1)
    assert [1, 2] == [proxied.incr("k"), proxied.incr("k")]
    assert proxy.dropped.is_set()
    proxied.connection_pool.disconnect()  # it may not have heard yet that this one is closed
    assert 3 == proxied.incr("k")
    proxy.drop_request(share=0.5)
    with pytest.raises(redis.ConnectionError):
        proxied.incr("k")
    assert b"3" == client.get("k")


def test_drop_message_closes_behind_it(proxy: Proxy, proxied: redis.Redis, client: redis.Redis) -> None:
    with proxied.pubsub() as pubsub:  # type: ignore[no-untyped-call]
        pubsub.subscribe("news")
        assert "subscribe" == pubsub.get_message(timeout=5)["type"]
        proxy.drop_message(share=1)
        client.publish("news", "one")
        assert b"one" == pubsub.get_message(timeout=5)["data"]
        assert proxy.dropped.wait(5)


def test_hold_keeps_replies_until_resume(proxy: Proxy, proxied: redis.Redis) -> None:
    proxied.ping()
    proxy.hold()
    answer = start(lambda: proxied.incr("k"))
    proxy.wait_for_request("INCRBY")
    assert not answer.done()
    proxy.resume()
    assert 1 == answer.result(5)


def test_cut_closes_connections_even_while_replies_are_held(proxy: Proxy, proxied: redis.Redis) -> None:
    proxied.ping()
    proxy.hold()
    answer = start(lambda: proxied.incr("k"))
    proxy.wait_for_request("INCRBY")
    proxy.cut()
    with pytest.raises(redis.ConnectionError):
        answer.result(5)
    proxy.resume()
    assert proxied.ping()


def test_refuse_accepts_nobody_until_accept(proxy: Proxy, proxied: redis.Redis) -> None:
    proxied.ping()
    proxy.refuse()
    proxy.cut()
    with pytest.raises(redis.ConnectionError):
        proxied.ping()
    proxy.accept()
    assert proxied.ping()


def test_close_on_closes_the_connection_for_a_script_of_so_many_keys(proxy: Proxy, proxied: redis.Redis) -> None:
    proxy.close_on("EVAL 2")
    for _ in range(2):
        assert 1 == proxied.eval("return 1", 1, "k")
        with pytest.raises(redis.ConnectionError):
            proxied.eval("return 1", 2, "k", "l")
    proxy.wait_for_reply("EVAL", 2)
    assert 2 == proxy.replies["EVAL"]
