"""Django: a view that waits for its turn, and gives up after five seconds.

    REDIS_URL=redis://127.0.0.1:6379/0 python examples/django_app.py

It is a whole project in one file. In yours, the client belongs in a module that views import, made once per process.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import django
import redis
from django.conf import settings
from django.http import HttpRequest, JsonResponse
from django.test import Client
from django.urls import path

from redislock_fast import Lock, LockError

settings.configure(
    ROOT_URLCONF=__name__,
    SECRET_KEY="example",
    ALLOWED_HOSTS=["*"],
    CACHES={"default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": os.environ["REDIS_URL"]}},
)
django.setup()

from django.core.cache import cache  # noqa: E402  # it needs the settings

client = redis.Redis.from_url(os.environ["REDIS_URL"])


def reserve(request: HttpRequest, item: int) -> JsonResponse:
    """Take one piece from the stock: read and write, with nobody in between."""
    try:
        with Lock(client, f"stock:{item}", timeout=10, blocking_timeout=5):
            left = cache.get_or_set(f"stock:{item}", 3)
            if left == 0:
                return JsonResponse({"error": "sold out"}, status=410)
            cache.set(f"stock:{item}", left - 1)
    except LockError:
        return JsonResponse({"error": "try again"}, status=503)
    return JsonResponse({"left": left - 1})


urlpatterns = [path("items/<int:item>/reserve", reserve)]


def main() -> None:
    """Five customers want the last three pieces at once."""
    with ThreadPoolExecutor(5) as customers:
        answers = list(customers.map(lambda _: Client().post("/items/4/reserve"), range(5)))
    print("reserved:", sorted(answer.json()["left"] for answer in answers if answer.status_code == 200))
    print("sold out:", sum(answer.status_code == 410 for answer in answers))


if __name__ == "__main__":
    main()
