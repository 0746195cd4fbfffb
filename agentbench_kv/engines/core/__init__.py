"""engines.core."""
