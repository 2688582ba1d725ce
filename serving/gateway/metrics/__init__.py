"""What a gateway knows as Prometheus families, and the page of them."""
