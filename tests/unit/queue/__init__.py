"""Procedures driven step by step."""
