"""The workloads that the commands run: what a thread, a task or a process does with the locks of a contestant."""
