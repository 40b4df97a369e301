"""What the benchmarks share: nothing here measures by itself."""
