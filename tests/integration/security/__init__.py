"""Secrets stay unseen, and users of the same server with few rights do no more than the docs say."""
