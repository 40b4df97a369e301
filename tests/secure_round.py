"""A round of secure aggregation in memory, step by step, whose coordinator can be told to lie."""

import dataclasses

import numpy as np

from edgefl.coordinator.pki import issue_client_certificate
from edgefl.core.secure_aggregation.aggregator import unmask_sum
from edgefl.core.secure_aggregation.graph import compute_neighbourhood
from edgefl.core.secure_aggregation.keys import CertificateIdentity
from edgefl.core.secure_aggregation.participant import ConsentRecorder, Participant
from edgefl.core.types import PeerMessage, SecureAggregationConfig, SecureStep
from edgefl.simulation.secure_boards import SimulatedIdentity

RUN, WORDS = "run-1", 40
CONFIG = SecureAggregationConfig(
    step=SecureStep.KEYS, group="v0-a1", version=0, threshold=0.67, clip=1.0, max_examples=100
)


class Round:
    """One attempt of some boards, step by step, by a coordinator that can be told to lie."""

    def __init__(self, participants, *, config=CONFIG):
        self.boards, self.config = participants, config
        self.adverts = self.shares = self.sharers = None
        self.total = np.zeros(WORDS, np.uint32)
        self.vectors, self.masked = {}, {}

    def step(self, step, **values):
        return dataclasses.replace(self.config, step=step, **values)

    def ask(self, name, config, bodies=None):
        messages = [PeerMessage(edge=(sender, name), step=0, body=body) for sender, body in (bodies or {}).items()]
        return {message.edge[1]: message.body for message in self.boards[name].answer(RUN, config, messages)}

    def advertise(self, names=None):
        config = self.step(SecureStep.KEYS)
        self.adverts = {name: self.ask(name, config)["coordinator"] for name in names or self.boards}

    def share(self, names=None):
        config = self.step(SecureStep.SHARES)
        self.shares = {name: self.ask(name, config, self.adverts) for name in names or self.adverts}
        self.sharers = list(self.shares)

    def mask(self, name, vector=None):
        config = self.step(SecureStep.UPDATE, num_members=len(self.adverts), sharers=self.list_sharers(name))
        bodies = {sender: self.shares[sender][name] for sender in self.sharers if name in self.shares[sender]}
        messages = [PeerMessage(edge=(sender, name), step=2, body=body) for sender, body in bodies.items()]
        self.boards[name].accept_shares(RUN, config, messages)
        if vector is None:
            vector = np.random.default_rng(int(name[1:])).integers(0, 2**32, WORDS, dtype=np.uint32)
        self.vectors[name] = vector.copy()
        (message,) = self.boards[name].mask(RUN, config, vector)
        masked = np.frombuffer(message.body[: 4 * WORDS], "<u4")
        self.masked[name] = message.body[4 * WORDS :]
        self.total += masked
        return masked

    def list_sharers(self, name):
        return tuple(self.sharers) if self.config.corrupted is not None else ()

    def consent(self, survivors, names=None):
        config = self.step(SecureStep.CONSENT, survivors=tuple(survivors), num_members=len(self.adverts))
        signatures = {name: found for name, found in self.masked.items() if found}
        return {name: self.ask(name, config, signatures)["coordinator"] for name in names or survivors}

    def open(self, survivors, signatures, names=None):
        config = self.step(SecureStep.UNMASK, survivors=tuple(survivors), num_members=len(self.adverts))
        return {name: self.ask(name, config, signatures)["coordinator"] for name in names or survivors}

    def unmask(self, survivors, openings):
        unmask_sum(
            self.total,
            adverts=self.adverts,
            holders={name: self.shares[name] for name in self.sharers},
            survivors=survivors,
            openings=openings,
            threshold=compute_neighbourhood(len(self.adverts), self.config).threshold,
        )
        return self.total

    def run_to_masks(self, survivors=None):
        self.advertise()
        self.share()
        for name in survivors or self.boards:
            self.mask(name)
        return self


def make_boards(count, **settings):
    names = [f"b{number:02}" for number in range(count)]
    return {name: Participant(SimulatedIdentity(name), ConsentRecorder(**settings)) for name in names}


def drop(names, fraction):
    return list(names)[: len(names) - int(fraction * len(names))]


def make_certified(names, authority):
    ca = authority.cert_pem
    found = {}
    for name in names:
        pair = issue_client_certificate(authority, name)
        found[name] = CertificateIdentity(name, key_pem=pair.key_pem, cert_pem=pair.cert_pem, ca_pem=ca)
    return found


def make_participants(identities):
    return {name: Participant(identity, ConsentRecorder()) for name, identity in identities.items()}
