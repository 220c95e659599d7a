"""Faults of the pipes in Python."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

FAULTS = (
    Fault(
        "reply to a caller that has given up goes to the next caller",
        "_pipe/threads_py.py",
        "            slot.claim(State.ABANDONED)\n",
        (
            "            slot.claim(State.ABANDONED)\n"
            "            if slot in self._slots:\n"
            "                self._slots.remove(slot)\n"
        ),
        "tests/pipe/test_pipes.py::test_a_caller_whose_time_is_up_harms_no_other[threads-python]",
    ),
    Fault(
        "replies go to the callers in the wrong order",
        "_pipe/threads_py.py",
        "                self._slots.append(slot)\n",
        "                self._slots.appendleft(slot)\n",
        "tests/pipe/test_pipes.py::test_each_caller_gets_its_own_reply_though_they_come_byte_by_byte[threads-python]",
    ),
    Fault(
        "reply that comes before its request is believed",
        "_pipe/threads_py.py",
        'raise hiredis.ProtocolError("a reply before its request has left")',
        "pass",
        "tests/pipe/test_threads_reader.py::test_a_reply_before_its_request_breaks_the_pipe_and_is_nobodys[python]",
    ),
    Fault(
        "request that was sent counts as unsent when the connection breaks",
        "_pipe/threads_py.py",
        "State.LOST if slot.begins < sent else State.UNSENT",
        "State.UNSENT",
        "tests/pipe/test_pipes.py::test_end_of_stream_fails_sent_requests_as_sent[threads-python-1]",
    ),
    Fault(
        "what has left in part over TLS counts as unsent",
        "_pipe/threads_py.py",
        "self._most = _RECORD_BYTES if over_tls else None",
        "self._most = None",
        "tests/pipe/test_many.py"
        "::test_what_was_half_sent_is_lost_as_sent_but_what_is_queued_behind_is_not[threads over TLS-python-listed]",
    ),
    Fault(
        "what arrives just as the lead leaves is nobody's to send",
        "_pipe/threads_py.py",
        "                if not left or not self._take_lead(slot):\n",
        "                if True:\n",
        "tests/pipe/test_threads_interrupts.py"
        "::test_a_call_that_begins_at_any_instruction_of_another_is_answered[_call]",
    ),
    Fault(
        "caller that gives up as it is made the lead keeps all others waiting",
        "_pipe/threads_py.py",
        '        return self._lead.get("") is slot or (slot.is_lead and not slot.is_named)\n',
        '        return self._lead.get("") is slot\n',
        "tests/pipe/test_threads_interrupts.py::test_an_heir_that_gives_up_at_any_instruction_hands_on",
    ),
    Fault(
        "thread that does not read keeps a lock that all callers of a pipe need",
        "_pipe/threads_py.py",
        "        self._check_forked()\n        if len(",
        (
            '        with self.__dict__.setdefault("_mutex", threading.Lock()):\n'
            "            self._check_forked()\n"
            "        if len("
        ),
        "tests/pipe/test_threads_interrupts.py"
        "::test_a_handler_at_any_instruction_may_wait_for_a_call_of_another_thread[_post]",
    ),
    Fault(
        "request of a task that was sent counts as unsent when the connection breaks",
        "_pipe/loop_py.py",
        "ConnectionBroken(index < self._sent, cause)",
        "ConnectionBroken(False, cause)",
        "tests/pipe/test_pipes.py::test_end_of_stream_fails_sent_requests_as_sent[asyncio-python-1]",
    ),
    Fault(
        "reply to a task that was cancelled goes to the next task",
        "_pipe/loop_py.py",
        "        elif future is not None and not future.done():\n            future.set_result(reply)\n",
        (
            "        elif future is not None and future.done():\n"
            "            self._complete(reply)\n"
            "        elif future is not None:\n"
            "            future.set_result(reply)\n"
        ),
        "tests/pipe/test_pipes.py::test_a_caller_whose_time_is_up_harms_no_other[asyncio-python]",
    ),
    Fault(
        "requests to a frozen server pile up without end",
        "_pipe/loop_py.py",
        "if self._queued_bytes > UNSENT_LIMIT_BYTES and now - self._heard_s > UNSENT_SILENCE_S:",
        "if False:",
        "tests/pipe/test_loop.py::test_queue_of_a_frozen_server_is_bounded",
    ),
    Fault(
        "reply without a request is dropped in silence",
        "_pipe/loop_py.py",
        'raise hiredis.ProtocolError("a reply without a request")',
        "return",
        "tests/pipe/test_loop.py::test_reply_before_its_request_has_left_breaks_the_pipe[python-asyncio]",
    ),
    Fault(
        "push is taken for a reply",
        "_pipe/loop_py.py",
        "                if type(reply) is not hiredis.PushNotification:\n",
        "                if True:\n",
        "tests/pipe/test_pipes.py::test_pushes_are_not_replies[asyncio-python]",
    ),
    Fault(
        "what is posted while the transport is called is written at once",
        "_pipe/loop_py.py",
        "        if self._writing:\n            return\n",
        "",
        "tests/pipe/test_loop.py::test_what_posts_while_the_transport_is_called_follows[python-asyncio-before]",
    ),
)
