"""An application as a user of the test kit has it, and its test files; copied and run by a pytest of their own."""
