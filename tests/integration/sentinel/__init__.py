"""Locks behind real sentinels."""
