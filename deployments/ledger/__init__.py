"""Exports the ledger for people and spreadsheets: a table of its sums, and a Parquet file a day."""
