"""One lock: acquire, release, extend, tokens, faults, cancelling, interrupts."""
