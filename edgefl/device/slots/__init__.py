"""Two virtual environments on a board, of which one is in use: how the other one is built, tried, and left again."""
