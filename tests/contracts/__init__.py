"""Contract suites: one protocol, every back end."""
