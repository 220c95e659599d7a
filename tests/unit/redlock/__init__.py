"""Majority rounds and leases of Redlocks, and how fast servers answer."""
