"""hiredis crashes if a signal handler raises while it packs a number. The reproduction for its authors.

`PyObject_Str` runs signal handlers, so it may fail for a number, too; `pack_command` uses its result unchecked.
"""

from __future__ import annotations

import signal

import hiredis
import pytest

from tests.support.helpers import run_script

REPRODUCTION = """
import itertools
import signal
import time

import hiredis

def interrupt(*_):
    raise TimeoutError

signal.signal(signal.SIGALRM, interrupt)
words = tuple(range(2000))
ends_at = time.monotonic() + 20
for count in itertools.count():
    if time.monotonic() > ends_at:
        break
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4 + count % 7 * 1e-5)
        while True:
            hiredis.pack_command(words)
    except TimeoutError:
        pass
"""


@pytest.mark.skipif(hiredis.__version__ != "3.5.0", reason="known of 3.5.0")
def test_signal_handler_that_raises_while_hiredis_packs_a_number_ends_the_process() -> None:
    assert -signal.SIGSEGV == run_script(REPRODUCTION).returncode
