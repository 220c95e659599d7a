"""Batches of locks."""
