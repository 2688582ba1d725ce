"""What an application shares through Ray: who has which slice, the link's secret, the last plan."""
