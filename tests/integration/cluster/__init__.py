"""Locks on real clusters."""
