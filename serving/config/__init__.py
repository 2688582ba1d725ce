"""What `serve_config.yaml` may say: schema, rules, checks, and the reference page made of them."""
