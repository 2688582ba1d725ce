"""The configuration in `serve_config.yaml`: schema, rules, checks, and its reference page."""
