"""Inference on a board: download, check, storage and serving of models without torch."""
