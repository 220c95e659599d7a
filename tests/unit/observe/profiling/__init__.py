"""What a profile records, without a server."""
