"""FastAPI: two requests for one invoice at once; the second is told that it is being charged.

    REDIS_URL=redis://127.0.0.1:6379/0 python examples/fastapi_app.py

In production: `uvicorn examples.fastapi_app:app --workers 4`. The lock holds across workers and machines.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import redis.asyncio
from fastapi import FastAPI, HTTPException, Request

from redislock_fast.asyncio import Lock


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One client for the app: all requests share its lock connection."""
    app.state.redis = redis.asyncio.Redis.from_url(os.environ["REDIS_URL"])
    yield
    await app.state.redis.aclose()


app = FastAPI(lifespan=lifespan)


@app.post("/invoices/{number}/charge")
async def charge(number: int, request: Request) -> dict[str, str]:
    """Charge an invoice, unless another request is at it."""
    lock = Lock(request.app.state.redis, f"invoice:{number}", timeout=10, auto_renew=True, cancel_on_lost=True)
    if not await lock.acquire(blocking=False):
        raise HTTPException(409, "this invoice is being charged")
    try:
        await asyncio.sleep(0.5)  # the call of the bank
    finally:
        await lock.release()
    return {"invoice": "charged"}


async def main() -> None:
    """Send two requests at once, and one afterwards."""
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://example") as http,
    ):
        both = await asyncio.gather(http.post("/invoices/17/charge"), http.post("/invoices/17/charge"))
        print("at once:", sorted(response.status_code for response in both))
        print("afterwards:", (await http.post("/invoices/17/charge")).status_code)


if __name__ == "__main__":
    asyncio.run(main())
