"""Monitoring: alerts, their webhook, and metrics for Prometheus."""
