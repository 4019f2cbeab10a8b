"""HTTP in and out: pure parse and render, thin serving."""
