"""Reservation: one committed handling of every operation, whatever the broker delivers."""
