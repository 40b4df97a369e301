"""Models and their training, in NumPy and torch, behind the calls of `core.types.Learner`.

Begin with `numpy_learner.py`. Only `torch_learner.py`, `gradient_matching.py` and the builders of `networks.py` use
torch, when they are called.
"""
