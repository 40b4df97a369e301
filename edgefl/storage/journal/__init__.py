"""The write-ahead journal of a run: `wal_journal` writes it, `record_encoding` and `file_format` are its bytes."""
