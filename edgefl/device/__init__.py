"""Device agent: Flower connection, trainer, heartbeat, enrolment."""
