"""The store of runs, rounds, updates, devices and models; the only package with SQL."""
