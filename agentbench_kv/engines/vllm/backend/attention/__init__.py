"""vLLM's attention backends, keeping the queries that a method wants."""
