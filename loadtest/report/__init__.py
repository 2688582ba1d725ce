"""Reports: scorecards and comparisons as files, tables and pages."""
