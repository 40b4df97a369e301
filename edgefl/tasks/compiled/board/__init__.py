"""What a board does with a compiled task: check its graphs and train by them. Begin with `onnx_learner.py`."""
