"""Renewals: what is due when, and who renews it."""
