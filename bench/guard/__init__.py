"""`python -m bench guard`: two source trees of the package, compared on the same servers.

`command` reads the options, starts the servers and prints the ratios; `tree` starts and asks the child processes of a
tree; `child` is such a process; `workloads` are the figures. `instructions` counts the instructions of the program
`counted` instead. A child imports the package of its tree and the bench of this one, so `child`, `counted`, `workloads`
and the modules that they import use only public names of the package.
"""
