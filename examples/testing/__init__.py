"""An application and its tests, with nothing but PostgreSQL: FENCEPOST_TEST_DATABASE=postgresql://... pytest examples/testing."""
