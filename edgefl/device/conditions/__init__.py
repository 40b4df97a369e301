"""Conditions of training on this board: what they ask of it, its budgets, and the decision. Begin with `gate`."""
