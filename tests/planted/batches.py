"""Faults of batches."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_ALL_OR_NOTHING = "tests/integration/batch/test_all_or_nothing.py::"

FAULTS = (
    Fault(
        "batch that fails leaves the keys that it has got",
        "_batch/acquisition.py",
        "if (failed if ours else self.unsettled)",
        "if self.unsettled and not ours",
        "tests/unit/batch/test_pipeline.py::test_acquire_takes_what_is_free",
    ),
    Fault(
        "batch leaves the keys of an attempt of unknown outcome",
        "_batch/acquisition.py",
        "if (failed if ours else self.unsettled)",
        "if failed and ours",
        "tests/unit/batch/test_pipeline.py::test_acquire_whose_replies_were_lost_finds_its_own_token",
    ),
    Fault(
        "lost request of a batch counts as never sent",
        "_protocol/pipeline.py",
        (
            "        self.unsettled = self.unsettled or sent\n"
            "        for index in self._open:\n"
            "            self._machine(index).note_unanswered(sent)\n"
        ),
        "        self.unsettled = self.unsettled or sent\n",
        "tests/unit/protocol/test_pipeline.py::test_release_that_finds_nothing_after_a_loss_was_executed_if_it_had_left",
    ),
    Fault(
        "error of one lock hides the verdicts of the others",
        "_protocol/pipeline.py",
        "                refusal = refusal or error\n",
        "                raise\n",
        "tests/unit/protocol/test_pipeline.py::test_a_refusal_is_raised_when_all_others_have_their_verdict",
    ),
    Fault(
        "two batches wait for the same locks in other orders",
        "_batch/acquisition.py",
        "sorted(range(len(keys)), key=keys.__getitem__)",
        "list(range(len(keys)))",
        f"{_ALL_OR_NOTHING}test_while_it_waits_it_holds_only_what_comes_before[threads-valkey]",
    ),
    Fault(
        "locks of a round that fails are not known to the cleanup",
        "_batch/acquisition.py",
        (
            "            self._lease.groups += groups  "
            "# before the servers are asked, so that every error cleans them up\n"
            "            yield all_of(operations, self._limit_s())\n"
        ),
        "            yield all_of(operations, self._limit_s())\n            self._lease.groups += groups\n",
        (
            "tests/integration/batch/test_interrupts.py::"
            "test_acquire_interrupted_at_any_line_leaves_nothing[KeyboardInterrupt-what is free]"
        ),
    ),
    Fault(
        "release of a batch that an error interrupts is given up",
        "locker.py",
        "        except RedisError:\n",
        "        except Exception:\n",
        "tests/integration/batch/test_interrupts.py::test_release_interrupted_at_any_line_goes_on[TimeIsUp-threads]",
    ),
    Fault(
        "release of a batch by a task that was dropped is given up",
        "asyncio/locker.py",
        "            self._transport.clean_up_dropped(loop, self._lease.entries())\n",
        "",
        "tests/integration/batch/test_asyncio.py::test_release_of_a_dropped_task_goes_on[valkey-asyncio]",
    ),
    Fault(
        "all_or_nothing keeps some locks when its time is up",
        "_batch/acquisition.py",
        "                    yield from self._give_back(set(order))\n                    return missed\n",
        "                    return missed\n",
        "tests/integration/batch/test_all_or_nothing.py::test_one_that_is_missed_undoes_the_rest[threads-valkey]",
    ),
    Fault(
        "released batch is renewed",
        "_batch/held.py",
        "            watch.end(held)\n",
        "            pass\n",
        "tests/integration/batch/test_watching.py::test_a_released_batch_is_renewed_no_more[threads-valkey]",
    ),
    Fault(
        "loss that a batch finds out by itself is not reported",
        "_batch/watching.py",
        "            self._renewer.report_loss(*loss)\n",
        "            pass\n",
        "tests/integration/batch/test_watching.py::test_a_call_that_finds_a_loss_reports_it[threads-valkey-extend]",
    ),
    Fault(
        "lost lock of a batch counts as released",
        "_batch/watching.py",
        "return result and self._locks[index].lease.loss is None",
        "return result",
        "tests/integration/batch/test_watching.py::test_a_lost_lock_stays_lost_though_its_key_has_the_token_again[threads-valkey]",
    ),
    Fault(
        "place in the queue is lost while a batch extends its leases",
        "_batch/acquisition.py",
        "limit, lease.token, refresh=refresh)",
        "Limit(0.1), lease.token, refresh=refresh)",
        f"{_ALL_OR_NOTHING}test_it_keeps_its_place_while_the_leases_before_it_are_prolonged[threads-valkey]",
    ),
    Fault(
        "all_or_nothing holds locks behind the one that it waits for",
        "_batch/acquisition.py",
        "                yield from self._give_back(set(order[held + 1 :]))\n",
        "",
        f"{_ALL_OR_NOTHING}test_while_it_waits_it_holds_only_what_comes_before[threads-valkey]",
    ),
    Fault(
        "leases end while a batch waits",
        "_batch/acquisition.py",
        "return [group for group in groups if group.expires_at is None or group.expires_at <= least]",
        "return []",
        (
            "tests/integration/batch/test_batch.py::"
            "test_what_is_lost_while_waiting_is_taken_again_or_missed[threads-valkey]"
        ),
    ),
    Fault(
        "deadline of a batch is ignored",
        "_batch/acquisition.py",
        "return self._left_s() == 0.0",
        "return False",
        "tests/integration/batch/test_all_or_nothing.py::test_one_that_is_missed_undoes_the_rest[threads-valkey]",
    ),
    Fault(
        "forked child releases the batch of its parent",
        "_batch/plan.py",
        "if self._generation != fork.generation():",
        "if False:",
        "tests/integration/batch/test_batch.py::test_a_forked_child_holds_nothing[announced-threads]",
    ),
    Fault(
        "name that comes twice is not refused",
        "_batch/plan.py",
        "if len(self.all_held if injective else set(self.keys)) != len(self.keys):",
        "if False:",
        "tests/integration/batch/test_batch.py::test_what_can_be_no_batch_is_refused_before_anything_is_sent",
    ),
)
