"""The coordinator's HTTPS API and its dashboard: one router for each resource, over the services of `context`.

Begin with `server`, which puts the routers together and serves them beside Flower's Fleet API. Nothing else of the
coordinator imports this package, but for `service`.
"""
