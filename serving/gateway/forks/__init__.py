"""Work of clients that may take too much: each piece in a process of its own, with limits."""
