"""Measuring a policy before training and comparing methods."""
