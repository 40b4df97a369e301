"""What a coordinator keeps on disk: its database, the journals of runs, and checkpoints.

`store.Store` is the place to begin: the database of devices, runs and their history. `queries` reads the history.
Imports `core` and `system` alone.
"""
