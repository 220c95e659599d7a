"""Elections: who leads, for how long, and who knows."""
