"""The real services behind demo, tests, benchmarks and CI: how each is obtained, started and stopped."""
