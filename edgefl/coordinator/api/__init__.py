"""The coordinator's HTTPS API: one module of routes for each resource."""
