"""What a real board can tell those who have none, in one file without secrets."""
