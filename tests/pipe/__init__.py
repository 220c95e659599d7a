"""The pipes, compiled and pure: every test runs on both, whichever implementation the package has chosen."""
