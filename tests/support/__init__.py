"""Helpers of the tests: proxies, clusters, callers, clocks; fixtures stand in `tests/conftest.py`."""
