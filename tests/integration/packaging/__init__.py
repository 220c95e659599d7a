"""What is installed, and how it imports."""
