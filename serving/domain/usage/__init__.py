"""What tenants use, and may use."""
