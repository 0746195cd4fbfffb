"""The micro tasks: generated tool-use episodes; nothing here knows tokens or torch."""
