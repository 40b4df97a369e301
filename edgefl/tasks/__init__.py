"""Built-in tasks: a model, a loss, and how to read a shard."""
