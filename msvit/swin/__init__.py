"""Swin Transformers: the adapter, cells that join at block `merge_at`, windows that may be partly empty."""
