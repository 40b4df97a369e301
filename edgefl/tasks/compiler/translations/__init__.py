"""Forms in ONNX of operators that torch's exporter lacks, or has only in a slow form. Begin with `registry.py`."""
