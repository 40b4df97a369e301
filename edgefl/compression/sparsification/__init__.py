"""Tensor stages that send some entries (top-k, ATOMO), or means of similar ones (LSS).

Begin with `sparsifiers.py`: its stages encode each tensor by itself, as `stages.EachTensorStage` has it.
"""
