"""Questions to the store in words, and its history as files."""
