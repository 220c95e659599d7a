"""The transports on real servers; these tests import private modules."""
