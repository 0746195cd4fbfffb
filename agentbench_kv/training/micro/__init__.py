"""micro."""
