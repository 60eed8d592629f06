"""Hugging Face checkpoints, read and written."""
