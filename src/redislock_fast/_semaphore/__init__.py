"""Semaphores: at most N holders, in the order of arrival.

A permit stands on a lock object that acquires, waits, renews, finds out a loss and releases by the procedures of locks:
its token says that it is a permit's, so the semaphore's scripts are sent for it. `permit_lock.py` is what all such lock
objects have in common, `callers.py` what each thread or task has acquired, `limiting.py` the names for `limited`.
"""
