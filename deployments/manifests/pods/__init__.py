"""The pods of a Ray cluster: head, gateways, control processes, hosts of slices."""
