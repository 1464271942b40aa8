"""The papers' own policies, from hand-made gains, norms and learning rates."""

from __future__ import annotations

import json
import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressors.base import kept
from compressors.powersgd import layout
from policies import Context, Measurement, StepReport, make_policy, policy_names
from policies.accordion import Accordion
from policies.base import DENSE
from policies.gravac import GraVAC
from tests.unit.gravac_world import FALLING, FASTER, GOOD, LADDER, RANGE, World

WINDOW = 4


def world(gain, seconds=FASTER, ranks=2):
    return World(GraVAC.paper(window=WINDOW, epsilon=0.5, omega=0.1), gain, seconds, ranks=ranks)


def sent(plans):
    return [plan.send for plan in plans]


def test_the_first_window_sends_the_smallest_cf_whatever_its_gain():
    run = world(dict.fromkeys(LADDER, 0.01))
    assert sent(run.run(WINDOW)) == [10.0] * WINDOW
    assert set(sent(run.run(WINDOW * len(LADDER)))) == {DENSE}


def test_windows_go_on_while_dense_is_sent_and_every_cf_is_looked_at():
    run = world({cf: gain / 100 for cf, gain in FALLING.items()})
    plans = run.run(WINDOW * len(LADDER))
    probed = [set(plan.probe) for plan in plans[WINDOW::WINDOW]]
    assert probed == [{10.0, cf} for cf in LADDER[1:]]
    assert run.policy.status()["exploring"] == 0
    assert not set(run.policy.plan().probe) - {10.0}


def test_each_cf_is_sent_for_a_window_as_soon_as_its_gain_is_known():
    run = world(GOOD)
    plans = run.run(WINDOW * len(LADDER))
    for i, cf in enumerate(LADDER[1:], start=1):
        assert sent(plans[i * WINDOW : (i + 1) * WINDOW])[1:] == [cf] * (WINDOW - 1)


def test_the_floor_rises_by_omega_and_stays_risen():
    gain = {10.0: 0.9, 20.0: 0.85, 40.0: 0.6, 160.0: 0.3, 1000.0: 0.2}
    run = world(gain)
    run.run(WINDOW * len(LADDER))
    assert run.policy.status()["floor"] == 20.0
    assert run.policy.status()["exploring"] == 0
    run.gain = dict.fromkeys(LADDER, 0.6)
    run.gain[run.policy.status()["candidate"]] = 0.0  # the chosen one fails: the floor serves
    assert run.policy.status()["candidate"] != 20.0
    assert sent(run.run(300))[-1] == 20.0


@pytest.mark.parametrize("make", [GraVAC.paper, GraVAC])
def test_a_settled_run_that_epsilon_keeps_dense_says_so_and_not_that_it_settled(make):
    run = World(make(window=WINDOW, epsilon=0.5, cooldown=1), GOOD, ranks=50)
    run.settle()
    run.run(WINDOW * 2 * len(LADDER))
    assert run.policy.verdict().startswith("GraVAC settled on CF ")
    run.gain = dict.fromkeys(LADDER, 0.0)
    run.run(300)
    assert run.policy.plan().send == DENSE
    assert run.policy.verdict() == "no gain reaches GraVAC's epsilon 0.5, so it sends dense"


def test_the_bare_rule_follows_epsilon_at_once_both_ways():
    run = world(GOOD, ranks=50)  # so that a step's gain is half of the average
    run.run(WINDOW + 1)
    assert run.policy.plan().send == 20.0
    run.gain[20.0] = 0.0
    run.run(1)
    assert run.policy.plan().send == 10.0
    run.gain[20.0] = 1.0
    run.run(1)
    assert run.policy.plan().send == 20.0


def test_it_settles_where_compression_throughput_saturates():
    seconds = {DENSE: 4.0, 10.0: 1.0, 20.0: 0.5, 40.0: 0.48, 160.0: 0.47, 1000.0: 0.465}
    run = world(GOOD, seconds)
    run.run(WINDOW * len(LADDER))
    assert run.policy.plan().send == 20.0
    assert re.search(
        "settled; CF .* progress a second than CF 20, .*\n0.50 s a step", run.policy.plan().reason
    )


def test_dense_is_no_choice_even_where_it_is_fastest():
    run = world(GOOD, {**dict.fromkeys(LADDER, 5.0), DENSE: 0.1})
    run.run(WINDOW * len(LADDER) + 5)
    assert DENSE not in sent(run.plans)


def test_the_raw_gain_is_a_ratio_of_norms_and_not_of_energies():
    measured = Measurement(
        kept=0.49, grad=1.0, total=1.0, error=0.51, kept_norms=0.7, grad_norms=1.0
    )
    assert measured.gain("raw") == pytest.approx(0.7)
    assert measured.gain("error_fed") == pytest.approx(0.49)
    for gain, compresses in (("raw", True), ("error_fed", False)):
        policy = GraVAC.paper(epsilon=0.6, window=1, gain=gain)
        policy.start(Context(RANGE, 2))
        policy.observe(StepReport(0, 10.0, {10.0: measured}))
        assert (policy.plan().send == 10.0) == compresses


def test_a_saved_state_goes_on_as_if_nothing_had_been():
    whole, parted = world(FALLING), world(FALLING)
    for steps in (1, WINDOW, 3 * WINDOW + 1, 20):
        whole.run(steps)
        parted.run(steps)
        state = json.loads(json.dumps(parted.policy.state_dict(), allow_nan=False))
        fresh = GraVAC.paper(window=WINDOW, epsilon=0.5, omega=0.1)
        fresh.start(Context(RANGE, 2, wire_bytes=lambda cf: 1e6 / cf))
        fresh.load_state_dict(state)
        parted.policy = fresh
    assert parted.plans == whole.plans
    assert parted.policy.state_dict() == whole.policy.state_dict()


def test_a_damaged_state_is_refused():
    run = world(GOOD)
    run.run(3)
    state = run.policy.state_dict()
    for damage in ({"judging": 99}, {"judging": -1}):
        with pytest.raises(ValueError, match="judging"):
            run.policy.load_state_dict({**state, **damage})


# Accordion

LAYERS = {"a": (10, 10), "b": (3, 100)}


def accordion(**settings):
    policy = Accordion.paper(*RANGE, **{"interval": 10, "epoch": 2, **settings})
    policy.start(Context(RANGE, 2, layers=LAYERS))
    return policy


def drive(policy, norms, steps, lrs=()):
    """norms[i]: by layer, of the i-th reading. Returns the plans."""
    plans, readings = [], 0
    for step in range(steps):
        plan = policy.plan()
        plans.append(plan)
        layers = {}
        if plan.read_sum:
            layers = norms[min(readings, len(norms) - 1)]
            readings += 1
        lr = lrs[step] if lrs else 0.1
        policy.observe(StepReport(step, plan.send, layer_norms=layers, lr=lr))
    return plans


def cfs_of(plan):
    return {name: plan.layers.get(name, plan.send) for name in LAYERS}


def test_local_gradients_of_one_epoch_of_each_interval_are_summed():
    plans = drive(accordion(), [{"a": 1.0, "b": 1.0}], 25)
    assert [i for i, plan in enumerate(plans) if plan.accumulate] == [0, 1, 10, 11, 20, 21]
    assert [i for i, plan in enumerate(plans) if plan.read_sum] == [2, 12, 22]
    assert all(plan.local_sum for plan in plans)


def test_each_layer_goes_to_high_by_its_own_norm_an_interval_before():
    norms = [{"a": 8.0, "b": 8.0}, {"a": 6.0, "b": 2.0}, {"a": 6.0, "b": 2.0}]
    plans = drive(accordion(), norms, 25)
    assert {*map(str, map(cfs_of, plans[:13]))} == {str({"a": 10.0, "b": 10.0})}
    assert cfs_of(plans[13]) == cfs_of(plans[22]) == {"a": 1000.0, "b": 10.0}
    assert cfs_of(plans[23]) == {"a": 1000.0, "b": 1000.0}


def test_a_dropped_learning_rate_is_critical_until_the_next_detection_only():
    lrs = [0.1] * 15 + [0.01] * 20
    plans = drive(accordion(), [{"a": 1.0, "b": 1.0}], 35, lrs)
    critical = [cfs_of(plan) == {"a": 10.0, "b": 10.0} for plan in plans]
    assert critical == [True] * 13 + [False] * 3 + [True] * 7 + [False] * 12


def test_a_learning_rate_that_drops_before_a_detection_is_critical_until_that_detection():
    lrs = [0.1] * 21 + [0.01] * 10
    plans = drive(accordion(), [{"a": 1.0, "b": 1.0}], 31, lrs)
    critical = [cfs_of(plan)["a"] == 10.0 for plan in plans]
    assert critical == [True] * 13 + [False] * 9 + [True] + [False] * 8


@pytest.mark.parametrize("ratio", [0.1, 0.6, 0.999])
def test_any_drop_of_the_learning_rate_is_critical(ratio):
    lrs = [0.1] * 15 + [0.1 * ratio] * 20
    plans = drive(accordion(), [{"a": 1.0, "b": 1.0}], 23, lrs)
    assert [cfs_of(plan)["a"] for plan in plans] == [10.0] * 13 + [1000.0] * 3 + [10.0] * 7


@pytest.mark.parametrize("steps_a_fall", [1, 7])
def test_a_schedule_that_falls_all_the_time_is_said_once_to_keep_all_critical(steps_a_fall):
    lrs = [0.1 * 0.99 ** (step // steps_a_fall) for step in range(60)]
    policy = accordion()
    plans = drive(policy, [{"a": 1.0, "b": 1.0}], 60, lrs)
    assert {*map(str, map(cfs_of, plans[20:]))} >= {str({"a": 10.0, "b": 10.0})}
    assert sum("take rate_drop=0.5" in plan.reason for plan in plans) == 1
    assert "the learning rate keeps dropping" in policy.verdict()
    helped = accordion(rate_drop=0.5)
    plans = drive(helped, [{"a": 1.0, "b": 1.0}], 60, lrs)
    assert cfs_of(plans[-1]) == {"a": 1000.0, "b": 1000.0}
    assert not helped.verdict()


def test_a_learning_rate_that_drops_a_few_times_is_no_such_schedule():
    policy = accordion()
    lrs = [0.1] * 15 + [0.01] * 10 + [0.001] * 35
    plans = drive(policy, [{"a": 1.0, "b": 1.0}], 60, lrs)
    assert not any("keeps dropping" in plan.reason for plan in plans)
    assert not policy.verdict()


def test_tensors_of_one_dimension_are_sent_dense_whatever_the_regime():
    shapes = {"norm": (64,), **LAYERS, "bias": (1,), "scale": ()}
    policy = Accordion.paper(*RANGE, interval=10, epoch=2)
    policy.start(Context(RANGE, 2, layers=shapes))
    assert DENSE in policy.candidates()
    plans = drive(policy, [{"a": 1.0, "b": 1.0, "norm": 9.0}, {"a": 1.0, "b": 9.0}], 20)
    assert {plan.layers[name] for plan in plans for name in ("norm", "bias", "scale")} == {DENSE}
    assert plans[0].layers["a"] == plans[0].layers["b"] == 10.0
    assert (plans[-1].layers["a"], plans[-1].layers["b"]) == (1000.0, 10.0)
    elements, kept = 64 + 100 + 300 + 1 + 1, 64 + 10 + 30 + 1 + 1
    assert plans[0].send == pytest.approx(elements / kept)


def test_where_nothing_has_two_dimensions_there_is_nothing_to_compress():
    with pytest.raises(ValueError, match="no layer has two dimensions"):
        Accordion.paper(*RANGE).start(Context(RANGE, 2, layers={"norm": (64,)}))


def test_the_authors_pair_for_top_k_needs_a_range_that_holds_it():
    policy = Accordion.paper()
    with pytest.raises(ValueError, match=r"low=1\.0101: must be .* inside cf_range \(10, 1000\)"):
        policy.start(Context(RANGE, 2, layers=LAYERS))
    policy.start(Context((1, 10), 2, layers={"a": (100, 100)}))
    assert [kept(10_000, cf) for cf in policy.candidates() if cf > DENSE] == [9900, 1000]


@given(
    shapes=st.lists(
        st.lists(st.integers(1, 40), min_size=2, max_size=4), min_size=1, max_size=4
    ).map(lambda shapes: {str(i): tuple(shape) for i, shape in enumerate(shapes)}),
    ranks=st.tuples(st.integers(1, 6), st.integers(0, 5)),
)
def test_ranks_are_powersgds(shapes, ranks):
    low, high = ranks[0] + ranks[1], ranks[0]
    policy = Accordion.paper(low, high, as_ranks=True, interval=2)
    policy.start(Context((1, 1), 2, layers=shapes))
    norms = dict.fromkeys(shapes, 1.0)
    for rank in (low, low, low, low, high):  # the second reading is in step 3
        plan = policy.plan()
        for name, shape in shapes.items():
            numel = prod(shape)
            sides = shape[0] + numel // shape[0]
            now = layout(plan.layers.get(name, plan.send), numel, shape)
            if rank * sides < numel:
                assert now.rank == rank
            else:  # a matrix of this rank is no smaller than the layer
                assert now.rank == 0
        policy.observe(StepReport(0, plan.send, layer_norms=norms if plan.read_sum else {}))


def test_by_ranks_a_parameter_that_is_a_single_number_is_dense():
    policy = Accordion.paper(4, 1, as_ranks=True)
    policy.start(Context((1, 1), 2, layers={"matrix": (100, 100), "scale": ()}))
    assert policy.plan().layers == {"scale": DENSE, "matrix": 10_000 / (4 * 200)}
    policy = Accordion(4, 1, as_ranks=True, per_layer=True)  # vectors have regimes, too
    policy.start(Context((1, 1), 2, layers={"matrix": (100, 100), "scale": ()}))
    assert policy.plan().layers == {"scale": DENSE, "matrix": 10_000 / (4 * 200)}


def test_an_epoch_is_a_tenth_of_the_interval_if_nobody_says():
    policy = Accordion.paper(*RANGE, interval=40)
    policy.start(Context(RANGE, 2, layers=LAYERS))
    plans = drive(policy, [{"a": 1.0, "b": 1.0}], 40)
    assert sum(plan.accumulate for plan in plans) == 4


@pytest.mark.parametrize("settings", [{"epoch": 10}, {"epoch": 0}, {"interval": 1}])
def test_settings_that_do_not_fit_are_refused(settings):
    with pytest.raises(ValueError, match=r"epoch|interval"):
        accordion(**settings)


@pytest.mark.parametrize(
    ("name", "made"), [("gravac-paper", GraVAC.paper()), ("accordion-paper", Accordion.paper())]
)
def test_names_stand_for_the_papers_settings(name, made):
    assert name in policy_names()
    assert repr(make_policy(name)) == repr(made)
    assert repr(made) != repr(type(made)())


def test_the_papers_settings_can_be_changed():
    assert make_policy("gravac-paper", epsilon=0.9).epsilon == 0.9
    with pytest.raises(TypeError, match="drift"):
        GraVAC.paper(drift=0.3)
    policy = Accordion.paper(10, 100, interval=40, eta=0.2)
    assert (policy.high, policy.epoch, policy.eta, policy.layerwise) == (100, 4, 0.2, True)
