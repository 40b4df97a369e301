"""Enrolment: joining a fleet, the device key, and certificate renewal."""
