"""The HTTP edge: reads a request, checks its key and its fields, answers."""
