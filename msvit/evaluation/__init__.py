"""Evaluation: what a model costs and what it gives."""
