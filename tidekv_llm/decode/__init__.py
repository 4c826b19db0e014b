"""Decoding on the compressed cache, at true absolute positions."""
