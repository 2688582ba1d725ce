"""What a run writes: results, pages, an archive, and nothing that is secret."""
