"""How many rounds are one call: the more, the less the host takes; but until they are over, nobody is let in."""

from __future__ import annotations

from specpaged.speculation.octave import octave_of

FEW = 4  # rounds that are one call however long they take
LONGEST = 0.025  # seconds of a call of more rounds
_STAYS, _RECENT = 1.5, 0.2  # times as long, before calls become shorter again; of what rounds take, the last one


class CallLength:
    """`FEW` rounds, and twice as many, and again, up to `most`, as long as all of them take no more than LONGEST.

    What rounds take is known by the octave of the number of sequences, from the last calls. `few` in place of FEW says
    how many there are in any case.
    """

    def __init__(self, most: int, few: int = FEW):
        self.most = most
        self._few = min(few, most)
        self._round_seconds: dict[int, float] = {}  # by octave
        self._num_rounds: dict[int, int] = {}

    def num_rounds(self, num_seqs: int) -> int:
        """Of a call for so many sequences, at most."""
        return self._num_rounds.get(octave_of(num_seqs), self._few)

    def took(self, num_seqs: int, num_rounds: int, seconds: float) -> None:
        """So many rounds of so many sequences have taken so long."""
        octave, of_round = octave_of(num_seqs), seconds / num_rounds
        before = self._round_seconds.get(octave, of_round)
        of_round = self._round_seconds[octave] = before + _RECENT * (of_round - before)
        known, length = self.num_rounds(num_seqs), self._few
        while length < self.most:
            longer = min(2 * length, self.most)
            if longer * of_round > LONGEST * (_STAYS if longer <= known else 1.0):
                break
            length = longer
        self._num_rounds[octave] = length
