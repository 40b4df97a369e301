"""The operating system's side: atomic files, subprocesses, signals, systemd, the API client."""
