"""AD-PSGD: when an edge fires, both of its nodes take the mean of their two models, at once.

Source: Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgefl.decentralised.node import Arrays, Mail, Node, copied
from edgefl.types import Array, EdgeSide


class AdPsgd(Node):
    """The one who is asked averages and answers with the model it had; who asked moves by half of the difference.

    So both move by opposite amounts, whatever they learnt meanwhile, and the mean of all models is kept. When both
    ask at a time each takes the other's question for its answer. An answer that is lost breaks the balance: who asked
    asks anew, and the mean of the models has moved a little. Biased where the nodes' data differ.
    """

    def __init__(self, name: str, edges: Sequence[EdgeSide], *, learning_rate: float, period: int) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        self._asked: dict[str, Arrays] = {}

    def post(self, neighbours: Sequence[str]) -> list[Mail]:
        mail = []
        for neighbour in neighbours:
            if neighbour in self.edges:
                self._asked[neighbour] = copied(self.weights)
                mail.append(self._mail(neighbour, self.numbered(self.iterations), self._asked[neighbour]))
        return mail

    def _mail(self, neighbour: str, step: int, weights: Mapping[str, Array], *, is_reply: bool = False) -> Mail:
        return Mail(sender=self.name, receiver=neighbour, step=step, parts={"w": weights}, is_reply=is_reply)

    def take(self, mail: Mail) -> list[Mail]:
        if mail.is_reply:
            if mail.sender in self._asked and mail.receiver == self.name:
                self._approach(self._asked.pop(mail.sender), mail.parts["w"])
            return []
        if not self.is_news(mail):
            return []
        if mail.sender in self._asked:
            self._approach(self._asked.pop(mail.sender), mail.parts["w"])
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
