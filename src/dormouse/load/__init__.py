"""The load generator: requests on a plan that no answer can delay, and what became of them."""
