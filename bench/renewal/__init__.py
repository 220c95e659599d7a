"""`python -m bench renewal`: the cost of held locks. Each table has a module: `keeping`, `terms` and `stalls`."""
