"""The loss head in pieces: an output projection whose logits are computed lazily, inside the loss."""
