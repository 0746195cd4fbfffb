"""KV-cache methods, one file each on a small common base."""
