"""Whole files that take long: fail-overs, installations. `make test-all` runs them."""
