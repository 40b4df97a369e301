"""Training on a device: instructions, task cache, client state, trainer."""
