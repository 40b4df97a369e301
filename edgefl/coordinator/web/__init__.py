"""Dashboard page and its live feed."""
