"""EVOKE: whole spans leave the cache and come back when they are needed."""
