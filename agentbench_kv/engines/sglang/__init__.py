"""SGLang 0.5.12 with physical eviction, as a plug-in of its own plug-in framework."""
