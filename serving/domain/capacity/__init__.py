"""What one slice carries, and what one gateway does."""
