"""Saved models and gates: `file.py` writes files, `folder.py` folders and gates, `host.py` hosts, `model.py` models."""
