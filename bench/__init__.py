"""The bench: how fast locks are taken and given back, measured on a real server.

`python -m bench --help` lists the commands; `pytest bench --benchmark-only` tracks single
operations.

Rules: contestants are measured in interleaved rounds on one server, each is checked for correctness
in every round, and no figure is printed whose check failed. Two exceptions: `test_operations` calls the encoders, and
`commands` sends the package's release script.
"""
