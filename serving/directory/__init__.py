"""The state that an application shares through Ray: slices, the link's secret, the last plan."""
