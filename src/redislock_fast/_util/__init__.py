"""Helpers for all packages: times, tokens, forks, patches, errors, redis-py's settings. They import no other one."""
