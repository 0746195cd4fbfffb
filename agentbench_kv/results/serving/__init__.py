"""Repeated measurements of a server under load: what `kvbench bench serving` leaves behind."""
