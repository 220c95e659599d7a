"""Measuring: servers near and far away, interleaved rounds, tables and files. It knows the contestants' calls alone."""
