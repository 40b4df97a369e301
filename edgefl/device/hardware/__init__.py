"""Hardware of a board: capabilities, health, step rates, and training requirements."""
