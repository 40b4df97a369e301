"""Provisioning of devices: renders the files of `provisioning/` for cards, images and hosts."""
