"""What it costs to hold locks: to keep many of them renewed, each term by itself, and a stalled interpreter."""
