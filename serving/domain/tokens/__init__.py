"""What follows from token ids: a paced engine's tokens, and the names of blocks. Pure."""
