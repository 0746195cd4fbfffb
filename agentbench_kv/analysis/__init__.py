"""Looking inside: captures of attention, offline selection and replay, and what they show."""
