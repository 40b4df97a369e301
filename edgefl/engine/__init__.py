"""The round loop, stopping criteria and progress, and how a run's objects are built from its configuration."""
