"""Value stages: how many bits each number gets. One a file."""
