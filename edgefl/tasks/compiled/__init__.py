"""Tasks whose training step is data: ONNX graphs that a board runs without torch. Begin with `artefact.py`."""
