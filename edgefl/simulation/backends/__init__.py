"""Training backends of the simulator: in this process, in worker processes, or none."""
