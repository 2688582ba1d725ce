"""The reports of processes on what they do: metric names, log lines and traces."""
