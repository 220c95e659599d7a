"""Helpers without a package of their own: times, tokens, forks, errors. They import nothing of the others."""
