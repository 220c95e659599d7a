"""Held locks: renewal, losses, callbacks, metrics."""
