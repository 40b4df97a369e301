"""The Flower side: Flower's SuperLink and Fleet API inside this process, and messages independent of its types.

Begin with `superlink`, the only module that may import Flower.
"""
