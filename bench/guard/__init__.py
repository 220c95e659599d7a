"""`python -m bench guard`. A child imports the package of its tree and the bench of this one.

So `child`, `counted`, `workloads` and the modules that they import use only public names of the package.
"""
