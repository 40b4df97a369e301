"""A/B software updates: two virtual environments; the idle one is built, tried and rolled back."""
