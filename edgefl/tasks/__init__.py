"""Built-in tasks: a model, a loss, and a shard reader each."""
