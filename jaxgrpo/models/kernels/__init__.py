"""Attention as a formula over queries, keys and what makes their mask, and as kernels of chips."""
