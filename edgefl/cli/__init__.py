"""What a user types: one file per command group; parse, call, print."""
