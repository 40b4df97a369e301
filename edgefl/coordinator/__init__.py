"""The coordinator process: live fleet, embedded SuperLink, broker, presence, enrolment, API."""
