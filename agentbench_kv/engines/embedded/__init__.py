"""engines.embedded."""
