"""Monitoring: metrics for Prometheus, alerts, and their webhook. Begin with `metrics`."""
