"""The parts of the transports that need no connection."""
