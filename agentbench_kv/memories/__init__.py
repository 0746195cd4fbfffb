"""Packages that keep plain-text memories, each in a worker of its own environment."""
