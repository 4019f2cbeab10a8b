"""The simulated world: the real core over virtual time, with executors that cannot be told from real ones."""
