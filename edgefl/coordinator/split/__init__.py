"""The coordinator's side of split learning: the rest of a cut network, trained beside each board's first layers."""
