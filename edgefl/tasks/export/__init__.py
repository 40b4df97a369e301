"""Models as ONNX and torch files. Begin with `model_export.py`; onnx and torch are imported when they are used."""
