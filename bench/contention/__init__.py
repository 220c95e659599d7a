"""`python -m bench contention`: `command` runs the rounds, `window` measures a contestant in processes of `worker`."""
