"""Tests of the wing of elections, without a server."""
