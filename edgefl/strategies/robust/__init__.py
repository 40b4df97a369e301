"""Robust rules by name: what fewer than half of the devices send moves the model by a bounded amount."""
