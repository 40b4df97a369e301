"""A user's task pack as an owner of boards would write it: gulls told from terns by two measures, in NumPy alone."""
