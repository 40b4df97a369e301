"""Low-rank stages: matrices as a few pairs of vectors (ATOMO's SVD form, PowerSGD).

`matrices.py` has what both share: tensors as matrices, forms on the wire, vectors through a value stage.
"""
