"""Inference on a board: check, storage and serving of models without torch."""
