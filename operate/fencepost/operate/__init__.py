"""Operation: the one command line, status and doctor."""
