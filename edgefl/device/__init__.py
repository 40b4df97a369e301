"""The agent on a board: Flower connection, trainer, heartbeat, enrolment."""
