"""Locks of a majority of independent servers."""
