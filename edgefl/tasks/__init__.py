"""Built-in tasks (a model, a loss, and a shard reader each), and what a device trains them with.

Begin with `registry.py`, which makes a task by its name. Torch and ONNX are imported when they are used.
"""
