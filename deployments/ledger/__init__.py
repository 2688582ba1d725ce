"""The ledger as people and spreadsheets read it: a table of now, and a Parquet file a day."""
