"""Sentence encoders: texts to vectors, from what is on this machine; nothing is ever downloaded."""
