"""Compiler of torch tasks into ONNX graphs that boards train without torch. Begin with `compilation.py`.

Its modules import torch, onnx and onnxscript, so they are imported only where a task is compiled.
"""
