"""Reads traces of PyTorch trainings, without torch."""
