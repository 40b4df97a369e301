"""Who trains, on how much, and how updates become the next model. Pure."""
