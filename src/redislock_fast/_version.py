"""The version. This file holds nothing else."""

__version__ = "0.1.0"
