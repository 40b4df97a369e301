"""Value stages: encodings of each number in few bits. One a file."""
