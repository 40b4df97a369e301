"""Losses: what training makes small, and its slope by the model's outputs.

A loss gives one number for each example and is averaged over a batch; an example's weight multiplies its number, so a
weight of 2 counts like two examples. Several outputs of an example (values, labels, pixels, quantiles) are averaged
first. Begin with `registry.py`, which makes a loss by its name. They are no part of the learners, which compute them:
tasks name them and data is checked against them, both without torch. `learners/torch_losses.py` is torch's form.
"""
