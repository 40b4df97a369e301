"""Value stages: each number in few bits, rounded to the nearest, at random, or to a sign.

Each stage is one class, written on the entropy coders where levels are few.
"""
