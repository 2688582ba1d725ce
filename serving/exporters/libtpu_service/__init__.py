"""The reports of libtpu on its chips: its metric service, and the SDK in a process of its own."""
