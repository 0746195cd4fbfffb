"""Memories: what was said in earlier sessions comes back to a later one."""
