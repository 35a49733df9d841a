"""From pinned sources to parquet shards and the leakage ledger."""
