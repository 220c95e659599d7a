"""The wing of semaphores, without a server."""
