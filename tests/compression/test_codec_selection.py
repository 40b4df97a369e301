"""`auto`: whose uplink is slow gets a harder codec, and the accuracy of the run moves all of them."""

from dataclasses import replace

import pytest

from edgefl.compression.codec import make_codec
from edgefl.compression.codec_benchmark import compute_expected_bytes
from edgefl.compression.codec_selection import (
    CANDIDATES,
    INITIAL_SHARE,
    MAX_SHARE,
    MIN_SHARE,
    make_codec_selector,
    parse_auto_candidates,
)
from edgefl.core.errors import CodecError
from edgefl.core.types import (
    InstructionFailed,
    TensorSpec,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
)

SHAPES = (TensorSpec(name="w", shape=(300, 100)), TensorSpec(name="b", shape=(100,)))
SIZES = {"ef|fp16": 1000, "ef|int8": 500, "ef|topk:0.1|int8": 100, "ef|topk:0.01|int8": 10}
MODEL_BYTES = 2000


class Board:
    """Answers every assignment as a board with this uplink would."""

    def __init__(self, auto, name, *, up, down=1e6, compute_s=1.0, deadline_s=None):
        self.auto, self.name, self.up, self.down, self.compute_s = auto, name, up, down, compute_s
        self.deadline_s, self.count = deadline_s, 0

    def order(self, **changes):
        self.count += 1
        asked = TrainInstruction(
            assignment_id=f"{self.name}-{self.count}",
            device_id=self.name,
            base_version=0,
            plan=TrainConfig(epochs=1.0),
            codec=self.auto.specs[0],
            deadline_s=self.deadline_s,
        )
        return self.auto.adapt_instruction(replace(asked, **changes))

    def turn(self):
        """Does one assignment; returns the codec that it was asked for."""
        order = self.order()
        size = SIZES[order.codec]
        send_s = size / self.up + MODEL_BYTES / self.down
        if self.deadline_s is not None and send_s + self.compute_s > self.deadline_s:
            self.lose(order)
        else:
            self.auto.observe(updated(order, size, send_s=send_s, compute_s=self.compute_s), None)
        return order.codec

    def lose(self, order, outcome=UpdateStatus.LOST):
        event = InstructionFailed(device_id=self.name, assignment_id=order.assignment_id, outcome=outcome, reason="")
        self.auto.observe(event, None)

    def last_of(self, turns):
        return [self.turn() for _ in range(turns)][-1]


def updated(order, size, *, send_s, compute_s=5.0):
    metrics = UpdateMetrics(iterations=1, compute_s=compute_s, send_s=send_s, bytes_up=size, bytes_down=MODEL_BYTES)
    return Update(
        assignment_id=order.assignment_id, device_id=order.device_id, base_version=0, tensors={}, metrics=metrics
    )


def scored(auto, *accuracies):
    """Tells the accuracies of some versions, one after the other."""
    for accuracy in accuracies:
        auto.observe(
            InstructionFailed(device_id="e", assignment_id="e", outcome=UpdateStatus.LOST, reason=""), accuracy
        )


def test_a_device_that_nobody_has_measured_begins_in_the_middle_and_then_tries_fewer_bytes():
    board = Board(make_codec_selector(SIZES), "a", up=1e6)
    assert [board.turn() for _ in range(4)] == ["ef|int8", "ef|topk:0.1|int8", "ef|int8", "ef|fp16"]


def test_the_slower_the_uplink_the_harder_the_codec():
    auto = make_codec_selector(SIZES)
    # 12, 125, 625 and 5000 bytes take a quarter of a second, and that of the rest
    found = [Board(auto, str(up), up=up).last_of(8) for up in (50, 500, 2500, 20_000)]
    assert found == ["ef|topk:0.01|int8", "ef|topk:0.1|int8", "ef|int8", "ef|fp16"]


def test_a_board_that_computes_long_may_upload_long():
    auto = make_codec_selector(SIZES)
    found = [Board(auto, str(seconds), up=500, compute_s=seconds).last_of(9) for seconds in (1.0, 5.0, 11.0)]
    assert found == ["ef|topk:0.1|int8", "ef|int8", "ef|fp16"]


def test_latency_is_not_taken_for_a_slow_uplink():
    board = Board(make_codec_selector(SIZES), "a", up=1e6, down=500.0)  # the download takes four seconds
    assert board.last_of(6) == "ef|fp16"


@pytest.mark.parametrize(
    ("sizes", "s_per_byte", "last"),
    [
        # A codec for the large layer, as `[compression.layers]` has it, leaves the candidates hardly any difference.
        ((1000, 980, 960, 955), 1e-5, "ef|fp16"),
        ((1000, 500, 490, 485), 1.0, "ef|int8"),
        (SIZES.values(), 0.0, "ef|fp16"),
        (SIZES.values(), float("nan"), "ef|int8"),
    ],
)
def test_bytes_that_are_hardly_saved_and_seconds_that_tell_nothing_drive_no_board_to_the_hardest_codec(
    sizes, s_per_byte, last
):
    sizes = dict(zip(SIZES, sizes, strict=True))
    auto = make_codec_selector(sizes)
    for number in range(12):
        order = auto.adapt_instruction(TrainInstruction(assignment_id=str(number), device_id="a", base_version=0,
                                       plan=TrainConfig(epochs=1.0), codec=auto.specs[0]))  # fmt: skip
        auto.observe(updated(order, sizes[order.codec], send_s=s_per_byte * sizes[order.codec]), None)
    assert order.codec == last


def test_lighter_goes_step_by_step_and_harder_at_once():
    board = Board(make_codec_selector(SIZES), "a", up=1e6)
    board.last_of(6)
    board.up = 20.0
    assert [board.turn() for _ in range(3)] == ["ef|fp16", "ef|topk:0.01|int8", "ef|topk:0.01|int8"]
    board.up = 1e6
    assert list(dict.fromkeys(board.turn() for _ in range(60))) == list(reversed(SIZES))


def test_a_board_that_never_comes_back_in_time_gets_a_harder_codec_every_time():
    board = Board(make_codec_selector(SIZES), "a", up=10.0, deadline_s=5.0)
    assert [board.turn() for _ in range(3)] == list(SIZES)[1:]


def test_a_codec_that_would_miss_the_deadline_is_not_asked_for_again():
    board = Board(make_codec_selector(SIZES), "a", up=300.0, compute_s=7.0, deadline_s=9.2)
    asked = [board.turn() for _ in range(12)]
    assert asked[:2] == ["ef|int8", "ef|topk:0.1|int8"]  # the first takes 8.7 s, and a fifth is to spare
    assert set(asked[2:]) == {"ef|topk:0.1|int8"}


@pytest.mark.parametrize("outcome", [UpdateStatus.FAILED, UpdateStatus.REJECTED])
def test_a_failure_says_nothing_of_the_uplink(outcome):
    board = Board(make_codec_selector(SIZES), "a", up=1e6)
    board.lose(board.order(), outcome)
    assert board.turn() == "ef|int8"


def test_the_share_halves_while_the_accuracy_rises_and_doubles_when_it_stalls():
    auto = make_codec_selector(SIZES)
    scored(auto, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    assert auto.link_estimates.share == INITIAL_SHARE / 2
    scored(auto, *[0.7] * 5)
    assert auto.link_estimates.share == INITIAL_SHARE / 2
    scored(auto, 0.7)
    assert auto.link_estimates.share == INITIAL_SHARE


def test_an_accuracy_that_creeps_changes_nothing():
    auto = make_codec_selector(SIZES)
    scored(auto, *(0.5 + 0.005 * n for n in range(30)))
    assert auto.link_estimates.share == INITIAL_SHARE


def test_the_share_stays_within_its_bounds():
    auto = make_codec_selector(SIZES)
    scored(auto, *(1 - 0.8**n for n in range(200)))
    assert auto.link_estimates.share >= MIN_SHARE
    scored(auto, *[0.5] * 200)
    assert auto.link_estimates.share == MAX_SHARE


def test_what_is_measured_takes_the_place_of_what_was_expected():
    auto = make_codec_selector({"fp16": 1000, "topk:0.1": 10})  # both are expected to be what they are not
    for number in range(40):
        auto.link_estimates.in_flight[str(number)] = number % 2, None
        metrics = UpdateMetrics(compute_s=1.0, send_s=1.0, bytes_up=600, bytes_down=1)
        auto.observe(
            Update(assignment_id=str(number), device_id="a", base_version=0, tensors={}, metrics=metrics), None
        )
    assert auto.link_estimates.sizes == pytest.approx([600, 600], rel=0.02)


def test_a_strategys_own_codec_and_blocks_stay_as_they_are():
    board = Board(make_codec_selector(SIZES), "a", up=1.0)
    assert board.order(codec="sign").codec == "sign"
    assert board.order(codec=None).codec is None
    assert board.order(block=3).codec == "ef|fp16"


def test_nothing_is_kept_of_assignments_that_are_over():
    auto = make_codec_selector(SIZES)
    board = Board(auto, "a", up=500)
    board.last_of(20)
    board.lose(board.order())
    assert auto.link_estimates.in_flight == {}


def test_a_plain_auto_chooses_among_codecs_with_feedback_each_smaller_than_the_one_before():
    assert parse_auto_candidates("auto") == CANDIDATES
    sizes = [compute_expected_bytes(spec, SHAPES) for spec in CANDIDATES]
    assert sizes == sorted(sizes, reverse=True)
    assert all(make_codec(spec, SHAPES) for spec in CANDIDATES)


def test_candidates_may_be_named_in_any_order():
    assert parse_auto_candidates("auto: topk:0.01|int8 , fp16") == ("topk:0.01|int8", "fp16")
    assert list(make_codec_selector({"topk:0.01": 10, "fp16": 1000}).specs) == ["fp16", "topk:0.01"]


def test_codecs_of_layers_go_behind_every_candidate():
    assert parse_auto_candidates("auto:fp16,int8; *.bias = dense") == ("fp16; *.bias = dense", "int8; *.bias = dense")


@pytest.mark.parametrize("line", ["dense", "topk:0.01|int8", "ef|auto", "automatic"])
def test_a_codecs_line_is_not_auto(line):
    assert parse_auto_candidates(line) is None


@pytest.mark.parametrize("line", ["auto:", "auto:fp16", "auto:fp16,fp16", "auto:fp16,,int8"])
def test_auto_needs_two_codecs_or_more(line):
    with pytest.raises(CodecError, match="two or more codecs"):
        parse_auto_candidates(line)


def order(auto, name="a", number=1):
    plan = TrainConfig(epochs=1.0)
    return TrainInstruction(
        assignment_id=f"{name}-{number}", device_id=name, base_version=0, plan=plan, codec=auto.specs[0]
    )


def test_a_device_on_a_metered_connection_gets_the_fewest_bytes_that_are_worth_it_and_its_own_rung_afterwards():
    auto = make_codec_selector({"dense": 1000, "fp16": 500, "int8": 250, "topk:0.01": 249})
    assert auto.adapt_instruction(order(auto), is_metered=True).codec == "int8"  # the last saves nothing more
    made = auto.adapt_instruction(order(auto, number=2))
    assert made.codec == "fp16"
    for number, is_metered in ((3, True), (4, True), (5, False)):
        made = auto.adapt_instruction(order(auto, number=number), is_metered=is_metered)
        auto.observe(updated(made, {"fp16": 500, "int8": 250, "dense": 1000}[made.codec], send_s=0.001), None)
    for number in range(6, 30):  # every body has bytes that were not expected, which candidates never tried lack
        made = auto.adapt_instruction(order(auto, number=number), is_metered=True)
        assert made.codec == "int8"
        auto.observe(updated(made, 2000, send_s=0.001), None)
    assert auto.adapt_instruction(order(auto, number=31), is_metered=True).codec == "int8"


def test_the_codec_for_metered_connections_goes_to_nobody_else_and_teaches_nothing():
    one, auto = (make_codec_selector(sizes, "topk:0.01") for sizes in ({"fp16": 1}, {"fp16": 500, "int8": 250}))
    for made in (one, auto):
        assert made.adapt_instruction(order(made), is_metered=True).codec == "topk:0.01"
        assert made.link_estimates.in_flight == {}
        assert made.adapt_instruction(order(made)).codec == "fp16"
        made.observe(updated(order(made), 5, send_s=1.0), None)
    assert one.link_estimates.in_flight == one.link_estimates.ways == {}
    own = replace(order(one), codec="sign")
    assert one.adapt_instruction(own, is_metered=True) is own
    with pytest.raises(CodecError, match=r"^it and up both begin with ef\| or neither does, got ef\|int8 and fp16"):
        make_codec_selector({"fp16": 1}, "ef|int8")


def test_codecs_with_and_without_feedback_do_not_mix():
    with pytest.raises(CodecError, match=r"all of its codecs begin with ef\| or none does, got ef\|int8 and fp16"):
        make_codec_selector({"fp16": 1000, "ef|int8": 500})


def test_bytes_that_were_spent_before_the_run_say_nothing_of_the_uplink():
    ahead = {"bytes_up_ahead": 5000.0, "bytes_down_ahead": 90_000.0}
    learnt = []
    for extra, up, down in (({}, 600, 1), (ahead, 5600, 90_001)):
        auto = make_codec_selector(dict.fromkeys(CANDIDATES, 600))
        plan = TrainConfig(iterations=1)
        order = TrainInstruction(assignment_id="a", device_id="pi", base_version=0, plan=plan, codec=auto.specs[0])
        auto.adapt_instruction(order)
        metrics = UpdateMetrics(compute_s=1.0, send_s=1.0, bytes_up=up, bytes_down=down, extra=extra)
        update = Update(assignment_id="a", device_id="pi", base_version=0, tensors={}, metrics=metrics)
        auto.observe(update, None)
        learnt.append((auto.link_estimates.ways["pi"], auto.link_estimates.sizes))
    assert learnt[0] == learnt[1]
