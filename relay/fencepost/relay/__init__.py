"""Delivery: the transactional outbox and the sidecar that publishes it."""
