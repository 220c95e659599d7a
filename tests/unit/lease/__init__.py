"""What is held and until when, without a server."""
