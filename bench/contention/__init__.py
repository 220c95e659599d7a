"""`python -m bench contention`: what locks cost those who wait for them.

`command` reads the options and runs the rounds; `window` measures one contestant for some seconds, with the processes
that `worker` is; `figures` makes figures of what they recorded; `goals`, `tables` and `page` say what is to be said of
them. Rules: every worker is a thread or a task of a real process that connects for itself; nothing is believed that the
workers' own records do not show.
"""
