"""Budgets without labels: thresholds, gates, merge schedules and weights for a share of the dense model's cost."""
