"""A store with shorthands to fill it."""

from edgefl.storage.repositories.records import AssignmentRow, EvaluationRow, UpdateRow
from edgefl.storage.store import Store


class FilledStore(Store):
    """A real store; the methods below only spare the tests to spell every column."""

    secret = "ab" * 32

    def submit(self, run_id, **changes):
        values = {
            "name": "first", "task": "digits", "strategy": "fedavg", "config": {"run": {"rounds": 3}}, "seed": 7,
            "submitted_at": 1000.0,
        }  # fmt: skip
        return self.add_run(run_id=run_id, **{**values, **changes}).run_id

    def make_token(self, token_id="t1", **changes):
        values = {"secret_sha256": self.secret, "expires_at": 2000.0, "uses": 1, "groups": ()}
        self.add_token(token_id=token_id, **{**values, **changes})

    def join(self, device_id, *, key=None, token_id="t1", secret=secret, now=1000.0, **changes):
        return self.enroll_device(
            token_id=token_id, secret_sha256=secret, now=now, device_id=device_id,
            public_key=key or f"key of {device_id}".encode(), **changes,
        )  # fmt: skip

    def record_round(self, run_id, number, devices, *, at=1000.0, loss=0.5, bytes_up=100):
        """One synchronous round: every device gets an assignment, answers, and is used."""
        self.open_round(run_id, number, started_at=at)
        ids = {device: f"{run_id}-{number}-{device}" for device in devices}
        dispatches = [
            AssignmentRow(assignment_id=i, device_id=d, round=number, base_version=number - 1, dispatched_at=at)
            for d, i in ids.items()
        ]
        updates = [
            UpdateRow(
                assignment_id=i, device_id=d, round=number, base_version=number - 1, iterations=5,
                num_examples=10 * (place + 1), bytes_up=bytes_up, bytes_down=2 * bytes_up, compute_s=1.0,
                send_s=0.25, wait_s=0.5, loss=loss + place, received_at=at + 2,
            )
            for place, (d, i) in enumerate(ids.items())
        ]  # fmt: skip
        self.record_assignments(run_id, dispatches)
        self.record_updates(run_id, updates)
        self.mark_applied(run_id, list(ids.values()), applied_version=number - 1)
        self.close_round(run_id, number, version=number, closed_at=at + 3)

    def evaluate(self, run_id, number, source, *, device="d1", accuracy=0.5, num_examples=100, at=1003.0, subject=""):
        row = EvaluationRow(
            assignment_id=f"e-{number}-{source}-{device}{subject}", round=number, version=number, device_id=device,
            source=source, loss=1.0, accuracy=accuracy, num_examples=num_examples, at=at, subject=subject,
        )  # fmt: skip
        self.record_evaluations(run_id, [row])
