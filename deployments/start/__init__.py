"""Starting an application on this machine: its ports, `slicewise serve`, why it did not start."""
