"""A wing: what metrics libraries and the profiler make of the reports of `_lease/metrics.py`."""
