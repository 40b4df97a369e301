"""The store of runs, rounds, updates, devices and models; the only room that knows SQL."""
