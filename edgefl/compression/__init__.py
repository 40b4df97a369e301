"""Codecs of updates and models: a tensor stage, a value stage and a lossless stage, on one wire format.

Begin with `codec.py` (lines such as `topk:0.01|int8`), `stages.py` (the interfaces) and `wire.py` (the header).
Imports `edgefl.core` alone.
"""
