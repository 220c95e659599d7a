"""Faults of the compiled core. Their tests run on a core that is built with them."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

FAULTS = (
    Fault(
        "connection is closed as idle while a reply is to come",
        "_pipe/threads.pyx",
        "idle = not self.reading and not self.dead and self.head == NULL",
        "idle = not self.reading and not self.dead",
        "tests/pipe/test_threads.py::test_pipe_is_closed_as_idle_while_nobody_uses_it",
    ),
    Fault(
        "compiled: request that was sent counts as unsent when the connection breaks",
        "_pipe/threads.pyx",
        "slot.state = LOST if slot.begins < self.sent else UNSENT",
        "slot.state = UNSENT",
        "tests/pipe/test_pipes.py::test_end_of_stream_fails_sent_requests_as_sent[threads-compiled-1]",
    ),
    Fault(
        "compiled: reply that comes before its request is believed",
        "_pipe/threads.pyx",
        "too_early = slot != NULL and not self._has_left(slot)",
        "too_early = False",
        "tests/pipe/test_threads_reader.py::test_a_reply_before_its_request_breaks_the_pipe_and_is_nobodys[compiled]",
    ),
    Fault(
        "compiled: reader that ends leaves the others without one",
        "_pipe/threads.pyx",
        "                    slot.state = LEAD\n",
        "                    slot.state = WAITING\n",
        "tests/pipe/test_threads.py::test_a_reader_whose_time_is_up_hands_reading_on[compiled]",
    ),
    Fault(
        "compiled: what has left in part over TLS counts as unsent",
        "_pipe/threads.pyx",
        "            self.sent = self.offered - (self.leaving.used - self.left) + size\n",
        "",
        "tests/pipe/test_many.py"
        "::test_what_was_half_sent_is_lost_as_sent_but_what_is_queued_behind_is_not[threads over TLS-compiled-listed]",
    ),
    Fault(
        "compiled: caller that queues over TLS does not wake the reader",
        "_pipe/threads.pyx",
        '            c_write(self.ringing, b"", 1)',
        "            pass",
        "tests/pipe/test_threads_tls.py::test_a_caller_wakes_the_listener_that_reads[compiled]",
    ),
    Fault(
        "compiled: TLS is used again though an interrupt left unknown what was read",
        "_pipe/threads.pyx",
        "            self._strike(error, UNKNOWN)\n",
        "            self._strike(error, STRUCK)\n",
        "tests/pipe/test_threads_tls.py"
        "::test_an_interrupt_within_the_tls_object_is_raised_and_breaks_the_pipe_alone[KeyboardInterrupt-read]",
    ),
    Fault(
        "compiled: error of a signal handler is taken for one of the network",
        "_pipe/threads.pyx",
        "        if isinstance(error, OSError) and (trace is None or trace.tb_next is None):\n",
        "        if isinstance(error, OSError):\n",
        "tests/pipe/test_threads_tls.py"
        "::test_an_interrupt_within_the_tls_object_is_raised_and_breaks_the_pipe_alone[TimeoutError-read]",
    ),
    Fault(
        "compiled: end of a TLS session is not noticed",
        "_pipe/threads.pyx",
        "            if got <= 0:\n                break\n            came += got\n",
        "            if got <= 0:\n                got = -EAGAIN\n                break\n            came += got\n",
        "tests/pipe/test_threads_tls.py::test_the_end_of_the_session_ends_the_pipe_before_anything_is_sent[compiled]",
    ),
    Fault(
        "compiled: woken callers leave the others of a crowd asleep",
        "_pipe/threads.pyx",
        "            ready = self._take_ready(FEWEST_ENTERING)\n",
        "            ready = NULL\n",
        "tests/pipe/test_threads_crowded.py::test_a_crowd_that_is_answered_in_one_piece_wakes_up_completely[compiled]",
    ),
    Fault(
        "compiled: caller that is not woken in time overlooks its reply",
        "_pipe/threads.pyx",
        "        if status != PY_LOCK_ACQUIRED and not self._has_ended(wait.slot):\n",
        "        if status != PY_LOCK_ACQUIRED:\n",
        "tests/pipe/test_threads_crowded.py"
        "::test_a_reply_that_came_in_time_counts_though_its_caller_was_not_woken_in_time",
    ),
    Fault(
        "compiled: thread that asks is not known to be inside",
        "_pipe/threads.pyx",
        "        inside.add(thread)\n",
        "",
        "tests/pipe/test_threads.py::test_asking_thread_is_inside_until_it_has_its_reply[compiled]",
    ),
    Fault(
        "compiled: request of a task that was sent counts as unsent when the connection breaks",
        "_pipe/loop.pyx",
        "ConnectionBroken(count > self.queued_count, cause)",
        "ConnectionBroken(False, cause)",
        "tests/pipe/test_pipes.py::test_end_of_stream_fails_sent_requests_as_sent[asyncio-compiled-1]",
    ),
    Fault(
        "compiled: reply without a request is dropped in silence",
        "_pipe/loop.pyx",
        'raise hiredis.ProtocolError("a reply without a request")',
        "return 0",
        "tests/pipe/test_loop.py::test_reply_before_its_request_has_left_breaks_the_pipe[compiled-asyncio]",
    ),
    Fault(
        "compiled: push is taken for a reply",
        "_pipe/loop.pyx",
        "            if type(reply) is not PushNotification:\n",
        "            if True:\n",
        "tests/pipe/test_pipes.py::test_pushes_are_not_replies[asyncio-compiled]",
    ),
    Fault(
        "compiled: what is posted while the transport is called is written at once",
        "_pipe/loop.pyx",
        "        if self.writing:",
        "        if False:",
        "tests/pipe/test_loop.py::test_what_posts_while_the_transport_is_called_follows[compiled-asyncio-before]",
    ),
    Fault(
        "compiled: requests to a frozen server pile up without end",
        "_pipe/loop.pyx",
        "if self.queued.used > unsent_limit_bytes and now - self.heard > unsent_silence_s:",
        "if False:",
        "tests/pipe/test_loop.py::test_queue_of_a_frozen_server_is_bounded",
    ),
    Fault(
        "compiled: negative number loses its sign",
        "_pipe/resp.pyx",
        ("            if number < 0:\n                at[0] = 45\n                at += 1\n"),
        ("            if number < 0:\n                at[0] = 48\n                at += 1\n"),
        "tests/pipe/test_encoding.py::test_twins_write_the_same_bytes",
    ),
    Fault(
        "compiled: run of equal replies takes one of the next caller",
        "_pipe/resp.pyx",
        "cdef Py_ssize_t end = min(size, length * most)",
        "cdef Py_ssize_t end = size",
        "tests/pipe/test_many.py::test_runs_of_equal_replies_are_shared_out_by_count[compiled]",
    ),
    Fault(
        "compiled: subscription is taken for a message",
        "_pipe/resp.pyx",
        'return len(push) > 0 and (push[0] == b"subscribe" or push[0] == b"ssubscribe")',
        "return False",
        "tests/pipe/test_pipes.py::test_a_subscription_is_answered_by_a_push[threads-compiled-subscribe]",
    ),
)
