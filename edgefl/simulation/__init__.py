"""The simulated fleet: real training mathematics on a discrete-event queue."""
