"""A model as a torch module: from its source, as a skeleton without weights, and which tensor it touches when."""
