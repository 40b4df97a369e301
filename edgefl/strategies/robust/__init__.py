"""Strategies that tolerate faulty or missing devices."""
