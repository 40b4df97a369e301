"""Letting boards in: tokens, the fleet's certificate authority, renewing certificates."""
