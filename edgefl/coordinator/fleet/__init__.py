"""Fleet: presence, device registry, telemetry, membership, draining and clone detection. Begin with `registry`."""
