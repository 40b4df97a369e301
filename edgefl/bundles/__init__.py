"""Releases and task packs on their way to boards: one signed file that holds wheels."""
