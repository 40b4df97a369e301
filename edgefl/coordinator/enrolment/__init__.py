"""Enrolment of devices: join tokens, certificates and their renewal."""
