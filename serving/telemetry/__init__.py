"""How processes report what they do: metric names, log lines and traces."""
