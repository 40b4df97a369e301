"""What kind of board this is, how it feels, how fast it is, and what it is too small for."""
