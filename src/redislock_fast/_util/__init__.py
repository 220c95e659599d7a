"""Helpers for all packages: times, tokens, forks, errors, redis-py's settings. They import no other package."""
