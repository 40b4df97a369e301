"""The write-ahead log of a run: records, segments, reader."""
