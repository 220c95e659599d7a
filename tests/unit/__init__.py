"""Tests without a server, in the folders of `src`: requests and replies, leases, procedures, routing."""
