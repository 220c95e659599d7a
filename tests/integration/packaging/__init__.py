"""The installed package, and its imports."""
