"""From texts and pictures to tensors, and from tensors to answers. Knows no server and no torch."""
