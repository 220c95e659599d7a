"""A model of a server, and simulations of waiters, holders and Redlocks with faults."""
