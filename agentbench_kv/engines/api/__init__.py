"""engines.api."""
