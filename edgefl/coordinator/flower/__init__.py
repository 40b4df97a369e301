"""The Flower side: Flower's SuperLink and Fleet API inside this process, and messages independent of its types.

Begin with `superlink`. Only `superlink` and `fleet_api` may import Flower.
"""
