"""`python -m bench contention`: the cost of locks that are waited for.

`command` reads the options and runs the rounds. `window` measures one contestant for some seconds, in processes that
run `worker`. `figures` computes figures from the records of the workers, and `goals`, `tables` and `page` show them.
Every worker is a thread or a task of a real process that connects by itself. All figures come from the records of the
workers.
"""
