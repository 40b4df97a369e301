"""Signed bundles that carry releases and task packs to boards: one file that holds wheels."""
