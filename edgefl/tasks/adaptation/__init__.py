"""What of a model is trained, and what of that travels: frozen bases, heads, biases and adapters of low rank."""
