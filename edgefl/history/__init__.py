"""The history of a store in words, as plots and as files.

`figures` draws, from the arrays of `series`; `plot_options` loads without matplotlib. Imports `core` and `storage`.
"""
