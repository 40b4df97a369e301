"""Tasks that a run file alone configures: rows of CSV files, windows of them, folders of pictures or of sounds.

Shapes follow from the options, since a coordinator has no data: columns, classes and sizes stand in the run file.
Begin with `options.py`, which checks them, and `table.py`. `registry.CONFIGURED` lists the tasks.
"""
