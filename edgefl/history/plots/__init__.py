"""Sheets drawn with matplotlib from the history; one file per family of figures. Only `names` loads without it."""
