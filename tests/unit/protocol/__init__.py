"""Commands driven by hand: the requests that they send, and what they make of each reply."""
