"""`python -m bench guard`: two source trees of the package, compared on the same servers.

`command` reads the options, starts the servers and prints the ratios; `child` is a process that measures the figures of
`workloads` with the package of a tree; `counted` is the program whose instructions are counted instead. A child imports
the package of its tree and the bench of this one, so `child`, `counted`, `workloads` and the modules that they import
use only public names of the package.
"""
