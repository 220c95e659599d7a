"""Locks whose keys linger in the process that has released them."""
