"""Fencing numbers and guarded writes."""
