"""Writes the modules for threads that are made from those for tasks, or checks that they are up to date.

    python .ci/unasync.py           writes them
    python .ci/unasync.py --check   fails where one of them is not what it would write

Each rule is a regular expression and what takes the place of its matches, in order. Then ruff sorts the imports,
removes those that only the text for tasks needs, and formats the file. A rule that matches nothing in any file is an
error: rules and texts go together.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = "src/redislock_fast/asyncio"

MODULES = ("election", "inspection", "locker", "redlock", "semaphore", "single")
FILES = {f"{SOURCES}/{name}.py": f"src/redislock_fast/{name}.py" for name in MODULES}

RULES = [
    # What only tasks need: cancelled or dropped calls, the running task and loop, the names of coroutines
    (r" *except GeneratorExit:.*\n(?:.*\n)*? +raise\n", ""),
    (r" *except \(asyncio\.CancelledError, GeneratorExit\):.*\n +raise\n", ""),
    (r" and exc_type is not GeneratorExit:.*", ":"),
    (r" *loop = asyncio\.get_running_loop\(\)\n", ""),
    (r" *@(?:coroutine_method|runs\(.*\))\n", ""),
    (r"named\((.+), \".+\"\)", r"\1"),
    (r"return (latest\.release\(\))", r"\1"),
    (r"await awaited\(((?:\w+\.)*\w+(?:\(\w+\))?)\)", r"\1"),
    (r"Acquiring\((.+)\)\n", r"\1\n"),
    (r" *say_why\(self, exc_value\)\n", ""),
    (r" *_is_for_tasks = True\n", ""),
    (r", current_task\(\)", ""),
    (r" *\"?cancel_on_lost(?:: bool = False|\": cancel_on_lost),\n", ""),
    (r" *\"?max_stall(?:: float \| None = None|\": max_stall|=max_stall),\n", ""),
    (r"auto_renew: bool \| Literal\[\"loop\"\]", "auto_renew: bool"),
    (r"    # The task that calls a method owns the lock.*\n\n", ""),
    # `sleep`, which redis-py's `acquire` for threads alone has
    (r"(self), (blocking: bool \| None = None)", r"\1, sleep: float | None = None, \2"),
    (r"RedlockCall\(self\._mine\(\), None", "RedlockCall(self._mine(), sleep"),
    (
        r"( +)blocking: whether to wait, instead",
        r"\1sleep: the longest random time between two attempts in seconds, instead of the lock's own setting.\n\g<0>",
    ),
    (r" +It gives the batch to `batch = await .*\n.*\n\n", ""),
    # Syntax and types
    (r"async (def|with|for) ", r"\1 "),
    (r"await ", ""),
    (r"AsyncIterator", "Iterator"),
    (r"__a(enter|exit)__", r"__\1__"),
    (r"(lead: Callable\[\[Term\], )Awaitable\[object\]", r"\1object"),
    (r"on_skip: Callable\[\[Skipped\], Any\],", "on_skip: Callable[[Skipped], _SkipResult],"),  # no awaitable
    (r"Once\[Any\]: \.\.\.", "Once[_SkipResult]: ..."),
    (r"(?:Awaitable\[|Acquiring\[|Coroutine\[Any, Any, )([^][]+(?:\[[^][]*\])?)\]", r"\1"),
    # Names
    (
        r"(from redislock_fast\._transport\.)loop\.driver import AsyncTransport, ",
        r"\1threads.server import ThreadServerTransport\n\1threads.driver import ",
    ),
    (r"AsyncTransport", "ThreadServerTransport"),
    (r"TaskCallers", "ThreadCallers"),
    (r"\bLoop(Quorum)", r"Thread\1"),
    (r"\bLoop(Renewer)", r"\1"),
    (r"(_transport|_redlock|_renewal|_election)\.loop", r"\1.threads"),
    (r"redis(lock_fast)?\.asyncio", r"redis\1"),
    # Words
    (r" for asyncio:", ":"),
    (r"redis-py's asyncio client", "redis-py's client"),
    (r"a client that blocks", "an asyncio client"),
    (r"the coroutine function", "the function"),
    (r"a plain function or", "a coroutine function or"),
    (r"(A|a)n `async with`", r"\1 `with`"),
    (r" +Where it does not while the lease is in danger, it is cancelled before the lease ends\.\n", ""),
    (r", or that was cancelled so,", ""),
    (r" *What these return is awaited where it is an awaitable\.\n\n", ""),
    (r"\bA cancelled", "An interrupted"),
    (r"is cancelled", "is interrupted"),
    (r" +(?:cancel_on_lost|max_stall): .*\n(?: {12}.*\n)+", ""),
    (
        r"(once,\n +)in the event loop\. An awaitable that it returns is awaited\.",
        r"\1in a thread of its own. Another thread may use the batch meanwhile, so it must not call the batch.",
    ),
    (
        r"(lost,\n +)in the event loop\. An awaitable that it returns is awaited\.",
        r"\1from a background thread, or by the release or extend that finds it out.",
    ),
    (r" An awaitable that it returns is\s+awaited\.", ""),
    (r"this object; as for `Lock`\.", "this object."),
    (r"the token that this task may use", "this thread's token"),
    (r"\btask(s?)\b", r"thread\1"),
    (r"`cancel_on_lost` without `thread_local`", "`cancel_on_lost`, which is for tasks"),
]


def generated(source: str, used: set[str]) -> str:
    """The text for threads of this file. `used` gets the rules that have matched."""
    text = (ROOT / source).read_text()
    for pattern, instead in RULES:
        text, count = re.subn(pattern, instead, text, flags=re.MULTILINE)
        if count:
            used.add(pattern)
    text = f"# Generated from {source} by .ci/unasync.py, as `make format` runs it: change that file.\n{text}"
    text = ruff(["check", "--fix-only", "--select=I,F401", "--quiet"], text, FILES[source])
    return ruff(["format", "--quiet"], text, FILES[source])


def ruff(command: list[str], text: str, name: str) -> str:
    """The text as ruff changes it, which takes the rules for this file."""
    words = [f"{sysconfig.get_path('scripts')}/ruff", *command, f"--stdin-filename={name}", "-"]
    changed: str = subprocess.check_output(words, cwd=ROOT, input=text, text=True)  # noqa: S603  # a tool of ours
    return changed


def main() -> int:
    """Write or check the files. Returns the exit status."""
    used: set[str] = set()
    texts = {FILES[source]: generated(source, used) for source in FILES}
    unused = [pattern for pattern, _ in RULES if pattern not in used]
    if unused:
        raise SystemExit(f"these rules match nothing: {unused}")
    stale = [name for name, text in texts.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    if sys.argv[1:] == ["--check"]:
        for name in stale:
            print(f"{name} is not what .ci/unasync.py makes of its source: run `make format`")
        return len(stale)
    for name in stale:
        (ROOT / name).write_text(texts[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
