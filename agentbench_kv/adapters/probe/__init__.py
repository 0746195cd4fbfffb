"""Probes: questions made by rule about real sessions, whose right answers are known."""
