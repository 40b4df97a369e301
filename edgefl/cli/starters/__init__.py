"""Files to begin with: tasks of one's own from templates; `files` also serves `edgefl strategies new`."""
