"""The bench: how fast locks are acquired and released, measured on real servers.

`python -m bench` runs a short selection, and `python -m bench --help` lists the commands.

Contestants are measured in interleaved rounds on one server. Each is checked for correctness in every round, and a
command stops when a check fails. The bench uses public names of the package, except where it sends the package's own
requests.

A command is a module in this folder, or a folder. `measuring` has rounds, servers and tables, `workloads` what the
commands run, `contestants` the locks that they compare.
"""
