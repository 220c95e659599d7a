"""The bench: how fast locks are acquired and released, measured on a real server.

`python -m bench --help` lists the commands; `pytest bench --benchmark-only` tracks single operations.

Contestants are measured in interleaved rounds on one server. Each is checked for correctness in every round, and a
command stops when a check fails. The bench uses public names of the package, with three exceptions: `test_operations`
calls the encoders, and `contestants.commands` and `contestants.bare` send its scripts.

The commands stand in this folder or in a folder each; `measuring` has rounds, servers and tables, `workloads` what the
commands run, `contestants` the locks that they compare.
"""
