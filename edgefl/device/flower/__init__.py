"""Flower side of a device: SuperNode client, HTTP connections, and upload of replies."""
