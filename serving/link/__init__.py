"""The token link: one authenticated, multiplexed connection per gateway and engine host."""
