"""Models as ONNX and torch files."""
