"""The way in: HAProxy as Ray Serve starts it, with a configuration of ours."""
