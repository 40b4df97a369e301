"""The Flower side: Flower's SuperLink and Fleet API inside this process, and messages independent of its types.

Begin with `superlink`; only `stock_messages` imports Flower.
"""
