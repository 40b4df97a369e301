"""Rollouts of models, releases and task packs to devices, canaries first."""
