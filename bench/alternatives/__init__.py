"""`python -m bench alternatives`: an acquire and release on Valkey, and on other systems that have locks.

`command` reads the options and prints the tables; `systems` lists the systems, each a module; `places` starts their
programs; `locks` has their common types. Every system runs on this machine, on loopback TCP, with its data in one file
system. Its row names where an acquired lock is kept. A system that is not installed is left out, with the name of its
Debian package.
"""
