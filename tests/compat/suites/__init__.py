"""Other projects' tests of their locks, run on redis-py's locks and on ours by `patch()`: `make compat`.

`catalogue.py` lists the projects, `environment.py` gets their source distributions from PyPI and makes an environment
for each, `running.py` runs the tests and compares the results. Not part of the usual runs: it needs the network.
"""
