"""A report-generation workflow on real documents: accepted, relayed, reserved, executed with effects, published."""
