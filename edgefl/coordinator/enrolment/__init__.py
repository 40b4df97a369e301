"""Enrolment of devices: join tokens, certificates, their renewal and rotation. Begin with `enrolment_service`."""
