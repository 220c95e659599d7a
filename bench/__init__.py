"""The bench: how fast locks are acquired and released, measured on real servers.

`python -m bench` runs a short selection, `python -m bench --help` lists the commands, and `pytest bench
--benchmark-only` tracks single operations.

Contestants are measured in interleaved rounds on one server. Each is checked for correctness in every round, and a
command stops when a check fails. The bench uses public names of the package, except where it sends the package's own
requests: in `test_operations`, `scripts` and `contestants`.

A command is a module in this folder, or a folder. `measuring` has rounds, servers and tables, `workloads` what the
commands run, `contestants` the locks that they compare.
"""
