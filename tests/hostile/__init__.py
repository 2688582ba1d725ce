"""What no polite client sends, at the shipped application with two real engines."""
