"""The report of a comparison: one HTML page that needs nothing but itself."""
