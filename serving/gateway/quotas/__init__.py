"""What tenants may use, counted over all gateways."""
