"""Waiting for contended locks."""
