"""Leases and owners, without a server."""
