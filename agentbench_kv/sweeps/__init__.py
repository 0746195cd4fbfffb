"""Sweeps: many runs, many workers, one folder."""
