"""Tasks of one's own: from templates, or compiled; `files` also serves `edgefl strategies new`."""
