"""Commands about a fleet, its coordinator, devices and models: they ask a coordinator, or read its directory."""
