"""Client of rollouts: fetches the models and bundles that the coordinator offers, and reports what became of them."""
