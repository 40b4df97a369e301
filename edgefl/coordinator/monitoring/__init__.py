"""What an operator is told without asking: alerts, the webhook, metrics for Prometheus."""
