"""One file per revision, numbered upwards."""
