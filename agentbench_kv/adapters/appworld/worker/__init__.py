"""What runs in AppWorld's own environment."""
