"""What libtpu says of its chips: its metric service, and the SDK in a process of its own."""
