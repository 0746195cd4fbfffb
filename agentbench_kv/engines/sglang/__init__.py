"""SGLang (0.5.12 or 0.5.23) with physical eviction, as a plug-in of its own plug-in framework."""
