"""New credentials for shared connections: the pools that know of them. No server."""

from __future__ import annotations

from redislock_fast._transport import pool_events


def test_pool_that_knows_no_authentication_anew_is_left_as_it_is() -> None:
    class Old:
        pass

    class ServerTransport:
        def authenticate(self, request: object) -> None:
            raise AssertionError(request)

    pool = Old()
    pool_events.notice_credentials(pool, ServerTransport())
    assert vars(pool) == {}
