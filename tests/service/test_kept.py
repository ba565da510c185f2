"""What is kept of all jobs of a person is not added up at every report, and never thought to be less than it is."""

from thinwire.service.jobs.kept import AGAIN_S, KeptOfPeople


class Stored:
    def __init__(self) -> None:
        self.size = {"anna": 100, "bert": 5}
        self.asked: list[str] = []
        self.now = 0.0
        self.kept = KeptOfPeople(lambda: self.now)

    def room(self, who: str, most: int = 1000) -> int:
        return self.kept.room(who, most, self._sum)

    def _sum(self, who: str) -> int:
        self.asked.append(who)
        return self.size[who]


def test_a_thousand_reports_add_up_all_jobs_once():
    stored = Stored()
    for n in range(1000):
        assert stored.room("anna", 5000) == 4900 - n
        stored.kept.add("anna", 1)
    stored.kept.add("bert", 3)  # of whom nothing is known yet
    stored.kept.add(None, 3)
    assert stored.room("bert") == 995
    assert stored.asked == ["anna", "bert"]


def test_who_deletes_has_room_at_once_and_what_others_add_is_seen_after_a_minute():
    stored = Stored()
    assert stored.room("anna") == 900
    stored.kept.add("anna", 900)
    stored.size["anna"] = 1000
    assert stored.room("anna") == 0
    stored.size["anna"] = 40
    assert stored.room("anna") == 960
    stored.size["anna"] = 700
    assert stored.room("anna") == 960
    stored.now += AGAIN_S
    assert stored.room("anna") == 300
