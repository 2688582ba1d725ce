"""What an engine has room for, and which of its gateways may send how much of whose work."""
