"""Scheduling and publication: leases, fences and effects over one SQL claimant."""
