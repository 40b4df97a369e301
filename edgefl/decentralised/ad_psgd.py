"""AD-PSGD: when an edge fires, both of its nodes take the mean of their two models, at once.

Source: Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgefl.decentralised.node import Arrays, Mail, Node, copied
from edgefl.types import Array, EdgeSide

PATIENCE = 8
"""So often an edge fires in vain while an answer is out; then it is taken for lost."""


@dataclass(slots=True)
class _Question:
    """What a neighbour was asked with, and how often its edge has fired since."""

    step: int
    weights: Arrays
    num_passed: int = 0


class AdPsgd(Node):
    """The one who is asked averages and answers with the model it had; who asked moves by half of the difference.

    So both move by opposite amounts, whatever they learnt meanwhile, and the mean of all models is kept. When both
    ask at a time each takes the other's question for its answer. Nobody asks again before the answer is there; one
    that is lost breaks the balance: who asked asks anew after a while, and the mean of the models has moved a little.
    Biased where the nodes' data differ.
    """

    def __init__(self, name: str, edges: Sequence[EdgeSide], *, learning_rate: float, period: int) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        self._asked: dict[str, _Question] = {}

    def post(self, neighbours: Sequence[str]) -> list[Mail]:
        mail = []
        for neighbour in neighbours:
            open_question = self._asked.get(neighbour)
            if open_question is not None and open_question.num_passed < PATIENCE:
                open_question.num_passed += 1
            elif neighbour in self.edges:
                question = _Question(step=self.numbered(self.iterations), weights=copied(self.weights))
                self._asked[neighbour] = question
                mail.append(self._mail(neighbour, question.step, question.weights))
        return mail

    def _mail(self, neighbour: str, step: int, weights: Mapping[str, Array], *, is_reply: bool = False) -> Mail:
        return Mail(sender=self.name, receiver=neighbour, step=step, parts={"w": weights}, is_reply=is_reply)

    def take(self, mail: Mail) -> list[Mail]:
        if mail.is_reply:
            question = self._asked.get(mail.sender)
            if question is not None and question.step == mail.step and mail.receiver == self.name:
                self._approach(self._asked.pop(mail.sender).weights, mail.parts["w"])
            return []
        if not self.is_news(mail):
            return []
        if mail.sender in self._asked:
            self._approach(self._asked.pop(mail.sender).weights, mail.parts["w"])
            return []
        had = copied(self.weights)
        self._approach(had, mail.parts["w"])
        return [self._mail(mail.sender, mail.step, had, is_reply=True)]

    def _approach(self, own: Mapping[str, Array], other: Mapping[str, Array]) -> None:
        for name, array in self.weights.items():
            array[...] += (other[name] - own[name]) / array.dtype.type(2)

    def left(self, neighbour: str) -> None:
        super().left(neighbour)
        self._asked.pop(neighbour, None)
