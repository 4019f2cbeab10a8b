"""One process per device: obeys commands, refuses late ones, reports events."""
