"""Joining a fleet, and staying in it: the join, the board's own key, and the renewal of its certificate."""
