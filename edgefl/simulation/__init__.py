"""The virtual fleet: the loop's other fleet, on an event heap, with real training mathematics."""
