"""What is told to a host's agent on the host itself: by its pod's end and by the node reader."""
