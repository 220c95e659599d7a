"""Tests through the public interface, on real servers."""
