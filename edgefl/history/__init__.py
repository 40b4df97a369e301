"""History of a store in words, as plots and as files."""
