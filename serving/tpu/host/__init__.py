"""What a TPU host lets a process do: read from its files, judged, and asked for."""
