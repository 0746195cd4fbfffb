"""methods.evoke."""
