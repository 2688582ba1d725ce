"""How processes tell what they do: metric names, log lines and traces."""
