"""The real services behind demo, tests, benchmarks and CI: how each is obtained, started and stopped.

`obtain` gives the first of address, Docker and native that answers; the other modules know one service each.
Invariant: everything listens on loopback only, and only processes started here are ever ended from here.
"""
