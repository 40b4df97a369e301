"""Who is there: presence, the roster and its diary, membership, draining, questions to single devices."""
