"""Gossip: each rank makes local steps, and exchanges parameters with its neighbours only.

No rank ever has the mean of all ranks. A topology (topology.py) gives each rank a few neighbours,
whatever the number of ranks. So a step costs one latency, not one for each rank. W are the weights,
g a rank's own update (of its optimizer, with momentum), C the compressor, x_i the parameters of
rank i, eta the consensus step size:

- D-PSGD (Lian and others 2017, algorithm 1):  x_i <- sum_j W_ij x_j - g_i, uncompressed.
- "naive" sends C(x) instead of x: x_i <- sum_j W_ij C(x_j) - g_i. Compression loses a part of the
  parameters in every step, and this loss does not fall as training converges. It is here for
  comparison with the other algorithms (Tang and others 2018, section 4).
- DCD-PSGD (Tang and others 2018, algorithm 1) compresses differences of a rank's own parameters,
  x_i <- x_i + C(sum_j W_ij x_j - g_i - x_i). So neighbours know x_j: the sum of its messages. It
  needs an unbiased C with little noise.
- DeepSqueeze (Tang and others 2019, algorithm 1) steps first, y_i = x_i - g_i, adds its error to
  the message, c_i = C(y_i + e_i), e_i <- y_i + e_i - c_i, and mixes:
  x_i <- y_i + eta sum_j W_ij (c_j - c_i).
- CHOCO-SGD (Koloskova and others 2019, algorithm 2) steps first, and sends the difference from h_i,
  the replica that its neighbours have of it, c_i = C(y_i - h_i), h_i <- h_i + c_i, and mixes:
  x_i <- y_i + eta sum_j W_ij (h_j - h_i).

A rank needs only the weighted sum of its neighbours' replicas, which is the sum of all messages. So
all five algorithms keep one tensor, the *offset*: the weighted difference of the neighbours'
parameters from this rank's. Some keep one more: DeepSqueeze its error, DCD-PSGD and CHOCO-SGD the
replica that neighbours have of this rank.

Rows and columns of W add up to 1, so offsets add up to 0 over the ranks. The mean of the ranks'
parameters moves by the mean of their updates: exactly with D-PSGD, DeepSqueeze and CHOCO-SGD; with
DCD-PSGD less the present error of C.

D-PSGD, DCD-PSGD and "naive" mix before the next step. Messages travel during forward and backward,
so the gradient is that of the parameters before mixing. DeepSqueeze and CHOCO-SGD keep the order of
their papers, and wait for messages in `optimizer.step()`.

With `every=H` a rank takes H steps between two exchanges, and g is their sum (for CHOCO-SGD and
D-PSGD: Li and others 2019, "Communication-Efficient Local Decentralized SGD Methods"). A round is
one exchange and the steps before it. A step of the policy and of the record is a round.

A user's rule (`GossipRule`) keeps its own tensors, and mixes in `optimizer.step()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import LBFGS, Optimizer

from adaptive.contrib.topology import TOPOLOGIES, Topology, TopologyName, check_matrices, named
from adaptive.exchange.bucket import (
    Bucket,
    BucketLayout,
    StepCFs,
    Unit,
    compress_levels,
    record_gradient_norms,
    record_levels,
    strided_sample,
)
from adaptive.exchange.strategies import Outgoing, pack, unpack
from adaptive.memory.handover import Groups
from adaptive.memory.inspection import MovedBetweenSteps
from adaptive.memory.optimizer_sync import unite_moments
from adaptive.memory.options import NAMED, Memory
from adaptive.memory.rule import Kept
from adaptive.model.chunks import Chunk, chunks
from adaptive.model.parameters import ModelParameter, shaped
from adaptive.model.state import check_like, flat_tensors
from adaptive.model.uniting import averaged, unite, unite_gradients
from adaptive.network.link import done_with
from adaptive.statistics.vector import Tally
from adaptive.step.averager import Averager
from adaptive.step.synchronisation import Synchronisation, check_all_moved
from adaptive.sync.base import Synchroniser
from compressors.base import Compressor, Key, Payload
from compressors.kernels import all_finite
from compressors.kernels.blocks import fill_if
from compressors.rounds import RoundsCompressor
from policies import Fixed, Policy, Schedule, Warmup, checks
from policies.base import DeclaredPolicy
from policies.checks import settings_of
from policies.state import require

AlgorithmName = Literal["auto", "d-psgd", "dcd-psgd", "deepsqueeze", "choco-sgd", "naive"]
ALGORITHMS: tuple[AlgorithmName, ...] = get_args(AlgorithmName)

STEP_SIZES = {"deepsqueeze": 2.0, "choco-sgd": 5.0}
"""Gossip algorithms with a consensus step size. The default size is min(1, this number / CF). With
a larger size the ranks may diverge (docs/research/gossip.md)."""

AT_ONCE = ("deepsqueeze", "choco-sgd")
"""Algorithms that mix in `optimizer.step()` itself, not before the next step."""

ADDING = ("dcd-psgd", "choco-sgd")
"""Algorithms whose offset is the sum of all messages since the start."""


class GossipRule(ABC):
    """A gossip rule: the message that a rank sends, and its new parameters from others' messages.

    A round is `Gossip.every` steps of the rank's own optimizer, then one exchange, in
    `optimizer.step()`: each rank sends the result of `tell`, compressed by the base, and sets its
    parameters to the result of `mix`. A call gets the tensors of several parameters, flat, so a
    rule works element by element. The rule object holds settings, the same on all ranks, and no
    state. State belongs in the tensors of `kept`, which are saved with the run.

    keeps: names of the tensors that a rank keeps, zero at first.
    """

    keeps: tuple[str, ...] = ()

    def begin(self, kept: Kept, here: Tensor) -> None:  # noqa: B027 - may do nothing
        """Fill the kept tensors, in place, when all ranks have the same parameters `here`: at the
        start, and whenever they were set to their mean."""

    @abstractmethod
    def tell(self, kept: Kept, here: Tensor) -> Tensor:
        """Returns the message (flat). here: the rank's parameters after its steps. Must change no
        tensor."""

    @abstractmethod
    def mix(self, kept: Kept, here: Tensor, sent: Tensor, mean: Tensor) -> Tensor:
        """Returns the rank's new parameters. May change `kept`, in place.

        sent: this rank's own message, decoded. mean: the sum of the decoded messages of the rank
        and its neighbours, with the weights of the topology."""

    def __repr__(self) -> str:
        """The class and its settings, which must be the same on all ranks."""
        return settings_of(self)


@dataclass(frozen=True, eq=False)
class Gossip(Synchronisation):
    """Each rank makes local steps and exchanges parameters with its neighbours
    (docs/research/gossip.md). No rank ever has the mean of all ranks. A step costs one latency,
    whatever the number of ranks. Gossip needs policy "fixed" (its default), "schedule" or "warmup",
    and one optimizer of all parameters.

    topology: the neighbours of each rank: "ring", "torus", "exponential" (1, 2, 4, ... ranks away),
        "one_peer" (one neighbour of "exponential" in each step, by turns), "complete", or a doubly
        stochastic matrix of shape (ranks, ranks), or several matrices used in turn.
    algorithm: "d-psgd" (for base "none"), "dcd-psgd" (compresses differences, for unbiased bases),
        "deepsqueeze" (has error feedback), "choco-sgd" (compresses differences from a replica) or
        "naive" (does not converge, for comparison). "auto": "d-psgd" with base "none", "choco-sgd"
        with a biased base, "dcd-psgd" with an unbiased one. Or your own `GossipRule`
        (docs/research/gossip.md), which mixes in `optimizer.step()`.
    consensus_step: with "deepsqueeze" and "choco-sgd", a rank moves by this share of the weighted
        difference from its neighbours, in (0, 1]. A larger CF needs a smaller share. None: 2 / CF
        and 5 / CF, at most 1.
    every: steps of each rank between two exchanges, a whole number >= 1. A round is `every` steps
        and their exchange. The policy and the timeline count each round as one step.

    ValueError or TypeError for a value that is not accepted."""

    topology: TopologyName | Tensor | Sequence[Tensor] = "ring"
    algorithm: AlgorithmName | GossipRule = "auto"
    consensus_step: float | None = None
    every: int = 1
    overlap = 0
    among_all: ClassVar[bool] = False
    memories: ClassVar[tuple[str, ...]] = ("auto", "none")
    caveat: ClassVar[str] = "gossip"
    default_policy: ClassVar[str] = "fixed"
    tied_to_ranks: ClassVar[str] = "gossip has other neighbours with another number of ranks"

    def __post_init__(self) -> None:
        of: Any = self.topology
        named_one = isinstance(of, str)
        of = checks.one_of("topology", of, TOPOLOGIES) if named_one else check_matrices(of)
        object.__setattr__(self, "topology", of)
        if not isinstance(self.algorithm, GossipRule | str):
            accepted = f"one of {', '.join(ALGORITHMS)}, or a GossipRule made"
            raise TypeError(f"algorithm must be {accepted}, got {self.algorithm!r}")
        if isinstance(self.algorithm, str):
            checks.one_of("algorithm", self.algorithm, ALGORITHMS)
        object.__setattr__(self, "every", checks.whole("every", self.every, least=1))
        if self.consensus_step is not None:
            step = checks.fraction("consensus_step", self.consensus_step)
            object.__setattr__(self, "consensus_step", step)
            if self.algorithm not in ("auto", *STEP_SIZES):
                raise ValueError(
                    f"consensus_step must be None with algorithm={self.algorithm!r}, got "
                    f"{self.consensus_step!r}; it is for {' and '.join(STEP_SIZES)}"
                )

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.every,)

    def for_base(self, base: Compressor) -> Gossip:
        if isinstance(base, RoundsCompressor):
            raise ValueError(
                f"base must make payloads of one rank's own with gossip; {base.name!r} sums over "
                f"all ranks in rounds"
            )
        algorithm, exact, biased = self.algorithm, base.name == "none", base.feeds_back
        if isinstance(algorithm, GossipRule):
            return self
        if algorithm == "auto":
            algorithm = "d-psgd" if exact else "choco-sgd" if biased else "dcd-psgd"
        if algorithm == "d-psgd" and not exact:
            raise ValueError(
                f"Gossip(algorithm='d-psgd') sends parameters as they are: base must be 'none', "
                f"got {base.name!r}"
            )
        if algorithm == "dcd-psgd" and biased and not exact:
            raise ValueError(
                f"Gossip(algorithm='dcd-psgd') needs an unbiased base (qsgd, natural, terngrad, "
                f"'none'), or the errors of differences add up; got {base.name!r}: use 'choco-sgd' "
                f"or 'deepsqueeze'"
            )
        # This runs __post_init__, which refuses a consensus_step that the algorithm does not have.
        return replace(self, algorithm=algorithm)

    def memory_of(self, memory: Memory) -> Memory:
        super().memory_of(memory)
        return NAMED["none"]  # each algorithm has its own error feedback, or none

    def check_optimizers(
        self, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]
    ) -> None:
        """ValueError unless there is one optimizer, of all parameters, and it is not LBFGS."""
        if len(optimizers) > 1:
            raise ValueError(f"gossip needs one optimizer of all parameters, got {len(optimizers)}")
        if any(isinstance(each, LBFGS) for each in optimizers):
            raise ValueError(
                "gossip does not go with LBFGS, which may need more backwards in a step on one "
                "rank than on another"
            )
        check_all_moved("gossip", optimizers, names)

    def check_policy(self, policy: Policy, compresses: bool) -> None:
        own = not isinstance(policy, DeclaredPolicy)  # a user's policy
        follows = own or isinstance(policy, Fixed | Schedule | Warmup)
        if policy.layerwise or (compresses and not follows):
            raise ValueError(
                f"policy must be 'fixed', 'schedule' or 'warmup' with gossip: gains of parameters "
                f"tell nothing about the quality of training; got {policy.name!r}"
            )

        if policy.measures:
            raise ValueError(
                f"policy must measure nothing of its own with gossip, for it gets no gradients; "
                f"got {policy.name!r} with measures={policy.measures}"
            )

    def messages(self, ranks: int) -> float:
        return self.topology_of(ranks).messages

    def start(self, averager: Averager) -> GossipSync:
        ruled = isinstance(self.algorithm, GossipRule)
        return RuledGossipSync(averager, self) if ruled else GossipSync(averager, self)

    def topology_of(self, ranks: int) -> Topology:
        """The topology of this number of ranks. ValueError if it is impossible."""
        of = self.topology
        made = named(of, ranks) if isinstance(of, str) else Topology("matrix", [*of])
        if made.ranks != ranks:
            raise ValueError(
                f"topology must be a matrix of ({ranks}, {ranks}), a row for each rank; got one of "
                f"({made.ranks}, {made.ranks})"
            )
        made.check()
        if self.algorithm in ("dcd-psgd", "choco-sgd") and len(made.rounds) > 1:
            raise ValueError(
                f"topology must be the same in every step with algorithm={self.algorithm!r}, which "
                f"keeps the weighted sum of its neighbours' replicas; got {made.name!r}"
            )
        return made

    def step_at(self, cf: float) -> float:
        """The consensus step size at this CF; 1 if the algorithm has none."""
        if self.consensus_step is not None:
            return self.consensus_step
        return min(1.0, STEP_SIZES.get(str(self.algorithm), cf) / cf)

    def __repr__(self) -> str:
        of: Any = self.topology
        if isinstance(of, Tensor):
            of = of.tolist() if len(of) > 1 else of[0].tolist()
        step = f"consensus_step={self.consensus_step}"
        return f"Gossip({of!r}, {self.algorithm!r}, {step}, every={self.every})"


@dataclass(eq=False)
class _Round:
    """The messages of the neighbours, under way.

    units: the units of a message. weights: of the senders, in the order of rows. arrived: waits for
    the messages, (senders, bytes)."""

    units: Sequence[Unit]
    weights: Sequence[float]
    arrived: Callable[[], Tensor]


@dataclass(eq=False)
class _Chunk(Chunk):
    """Parameters that are sent as one message. All tensors are flat.

    offset: see above. kept: by name, the other tensors that the algorithm or the rule keeps. sent:
    this rank's last message, decoded, for a rule. round: the messages under way."""

    offset: Tensor = field(init=False)
    sent: Tensor = field(init=False)
    kept: dict[str, Tensor] = field(default_factory=dict)
    round: _Round | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layout = BucketLayout(self.parameters)
        self.offset = torch.cat([p.zeros() for p in self.parameters])

    @torch.no_grad()
    def move(self, by: Tensor, alpha: float) -> None:
        """Add alpha times `by` to the parameters."""
        for p, each in self.pieces(by):
            p.tensor.add_(shaped(each, p.tensor), alpha=alpha)


class GossipSync(Synchroniser):
    """The synchroniser of gossip. All ranks have the same parameters when it starts.

    choice: the user's settings, with an algorithm; for a rule see `RuledGossipSync`. The last
    backward of a round has its exchange even if its step is left out, so that no rank waits in
    vain."""

    def __init__(self, averager: Averager, choice: Gossip) -> None:
        super().__init__(averager)
        self.algorithm = choice.algorithm
        self.at_once = self.algorithm in AT_ONCE
        self.parameters = list(averager.parameters.values())
        self.topology = choice.topology_of(averager.exchange.world_size)
        self._every = choice.every
        self._backwards = 0  # number of backwards in this round; 0 again after the last one
        self._ended = False  # the last backward of a round has ended, and not been exchanged yet
        self._step_at = choice.step_at
        self._granularity, self._exchange = averager.sizes.granularity, averager.exchange
        self._moved = MovedBetweenSteps(averager.parameters, averager.optimizers, choice)
        self._stepped: Optimizer | None = None  # the last one that has, whether handed over or not
        self._begin()

    # -- what the ranks do --

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Autograd gets the local gradients."""
        if bucket.index() == 0:
            self.make_up()
            if self._ends_round:
                self._moved.look(self._exchange)
                self.averager.begin(self.alike)
        return done_with(bucket.buffer())

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        self._ended = self._ends_round
        self.averager.controller.skipped += not self._ended
        self._backwards = (self._backwards + 1) % self._every
        return last

    @property
    def _ends_round(self) -> bool:
        """The backward under way is the last one of a round. The same on all ranks."""
        return self._backwards == self._every - 1

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        averager = self.averager
        had_backward = self._ended or self._backwards > 0  # since the last exchange
        if had_backward and not self._mixed and optimizer in averager.optimizers:
            averager.check_whole()
            stopwatch = averager.controller.stopwatch
            entered = stopwatch.timestamps()
            with stopwatch.held_up(), averager.noting_failure():
                self._mix()
            stopwatch.hook_left(entered, [(entered, stopwatch.timestamps())])
        self._moved.before_step(optimizer)
        self._stepped = optimizer
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        self._moved.after_step(optimizer)
        if optimizer in self.averager.optimizers:
            self._tell_neighbours()

    def forward_begins(self) -> None:
        # DDP may issue a collective in the forward. First do the exchange that this rank owes.
        self.make_up()

    @property
    def owes(self) -> bool:
        return self._ended

    def make_up(self) -> None:
        if self._ended:
            self.averager.check_whole()
            with self.averager.noting_failure():
                self._mix()
            self._tell_neighbours()

    def _tell_neighbours(self) -> None:
        """Send this round's messages, once for each round: after its last step, or later if this
        step was left out."""
        if not self._ended:
            return
        averager, controller = self.averager, self.averager.controller
        stopwatch = controller.stopwatch
        entered = stopwatch.timestamps()
        with stopwatch.held_up(), averager.noting_failure():
            self._mixed = self.at_once
            for index, chunk in enumerate(self._chunks):
                self._send(index, chunk, controller.step, controller.cfs, controller.tally)
            sent = stopwatch.timestamps()
            if self.at_once:  # with the consensus step size at this CF
                for chunk in self._chunks:
                    self._receive(chunk)
                    self._mix_at_once(chunk, controller.cfs.send)
            arrived = stopwatch.timestamps()
            controller.tally.at("grad").fill_(nan)  # gradients are not measured
            controller.end_step(averager.watch.take_found())
        self._ended = False
        stopwatch.hook_left(entered, [(sent, arrived)])

    # -- between steps --

    def wait(self) -> None:
        self._receive_all()

    def abandon(self) -> None:
        for chunk in self._chunks:
            with suppress(Exception):  # neighbours may have failed
                self._receive(chunk)  # else the next messages would be mistaken for these
        self._ended = False

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        return ()

    def averaged(self) -> AbstractContextManager[None]:
        self.make_up()
        self.wait()
        return averaged(self.parameters, self._exchange)

    def unite(self) -> Sequence[Optimizer]:
        return self._unite(of_means=False)

    def _unite(self, of_means: bool) -> Sequence[Optimizer]:
        """of_means: see `unite_moments`."""
        stepped = [] if self._stepped is None else [self._stepped]
        optimizers = [*(of for of in self.averager.optimizers if of not in stepped), *stepped]
        self.make_up()
        self.wait()
        unite(self.parameters, self._exchange)
        unite_moments(self.parameters, optimizers, self._exchange, of_means)
        self._begin()
        return optimizers

    def stop(self) -> None:
        self._unite(of_means=True)
        unite_gradients(self.parameters, self._exchange)

    def describe(self) -> str:
        return f"{self.algorithm} on a topology: {self.topology}"

    # -- the algorithms --

    def _begin(self) -> None:
        """Start from parameters that are the same on all ranks."""
        self._chunks = [self._chunk(each) for each in chunks(self.parameters)]
        self._mixed = True  # the last messages of the neighbours have moved the parameters

    def _chunk(self, parameters: Sequence[ModelParameter]) -> _Chunk:
        chunk = _Chunk(parameters)
        if self.algorithm == "deepsqueeze":
            chunk.kept["error"] = torch.zeros_like(chunk.offset)
        elif self.algorithm in ADDING:
            chunk.kept["replica"] = chunk.here("replica").clone()
        return chunk

    def _mix(self) -> None:
        """Before the optimizer's step: add the offset, with the neighbours' messages, to the
        parameters, unless that was done already."""
        if self._mixed:
            return
        self._mixed = True
        for chunk in self._chunks:
            self._receive(chunk)
            chunk.move(chunk.offset, 1.0)

    def _mix_at_once(self, chunk: _Chunk, cf: float) -> None:
        """Move the parameters, after the neighbours' messages were added to the offset."""
        chunk.move(chunk.offset, self._step_at(cf))

    def _send(self, index: int, chunk: _Chunk, step: int, cfs: StepCFs, tally: Tally) -> None:
        """Compress the message of a chunk, and send it to the neighbours."""
        rank = self._exchange.rank
        x = self._to_tell(chunk)
        bucket = self._bucket(chunk, x, step)
        units = [unit.at(step) for unit in self._granularity.cut(bucket, cfs)]
        record_gradient_norms(units, x, tally)
        payloads = [_payload(unit, bucket, cfs, tally) for unit in units]
        tally.at("nonfinite").add_(bucket.nonfinite)
        self._exchange.count_floats(sum(unit.floats for unit in units))
        out = Outgoing(index, bucket, units, payloads, lambda _: None, lambda _: None)
        weights = self.topology.sources(step, rank)
        own_weight = weights.pop(rank)
        arrived = self._exchange.to_neighbours(
            pack(out, units, payloads),
            self.topology.receivers(step, rank),
            list(weights),
        )
        chunk.round = _Round(units, list(weights.values()), arrived)
        self._take_in(chunk, x, units, payloads, own_weight)

    def _to_tell(self, chunk: _Chunk) -> Tensor:
        """The message before compression, in the chunk's buffer "sent"."""
        x = chunk.here("sent")
        if "error" in chunk.kept:
            x.add_(chunk.kept["error"])
        if "replica" in chunk.kept:
            x.sub_(chunk.kept["replica"])
        return x

    def _take_in(
        self,
        chunk: _Chunk,
        x: Tensor,
        units: Sequence[Unit],
        payloads: Sequence[Payload],
        weight: float,
    ) -> None:
        """Add this rank's own message, the payloads of `x`, to its offset and kept tensors."""
        if self.algorithm not in ADDING:
            chunk.offset.zero_()
        if self.algorithm in ("d-psgd", "naive"):  # offset = weighted sum - own parameters
            _add(chunk.offset, units, payloads, weight)
            chunk.offset.sub_(x)
        else:
            _add(chunk.offset, units, payloads, weight - 1)
        if "error" in chunk.kept:
            _add(chunk.kept["error"].copy_(x), units, payloads, -1.0)
        if "replica" in chunk.kept:
            _add(chunk.kept["replica"], units, payloads, 1.0)
        if self.algorithm == "dcd-psgd":
            chunk.go_to(chunk.kept["replica"])

    def _bucket(self, chunk: _Chunk, x: Tensor, step: int) -> Bucket:
        """`x` as a bucket. A nonfinite value makes the neighbours' parameters nonfinite, as a
        nonfinite gradient does in dense DDP."""
        key = Key("", step, rank=self._exchange.rank)
        bucket = Bucket(x, key, self._granularity.whole_buckets, chunk.layout)
        bucket.nonfinite = all_finite(x) ^ True
        fill_if(bucket.nonfinite, x, 0.0)
        return bucket

    def _receive(self, chunk: _Chunk) -> None:
        """Wait for the messages under way, and add them to the offset."""
        under_way, chunk.round = chunk.round, None
        if under_way is None:
            return
        units = under_way.units
        for weight, row in zip(under_way.weights, under_way.arrived(), strict=True):
            payloads = [payload for (payload,) in unpack(units, row[None])]
            _add(chunk.offset, units, payloads, weight)
            for payload in payloads:
                self._exchange.count_invalid(payload.invalid)

    def _receive_all(self) -> None:
        """Wait for all messages under way. The parameters do not change."""
        for chunk in self._chunks:
            self._receive(chunk)

    # -- saved --

    def state_dict(self) -> dict[str, Any]:
        self._receive_all()
        kept: dict[str, Tensor] = {}
        for chunk in self._chunks:
            for what, flat in self._saved(chunk).items():
                kept |= {f"{name}: {what}": each for name, each in chunk.by_name(flat).items()}
        return {"backwards": self._backwards, "mixed": self._mixed, "kept": kept}

    def _saved(self, chunk: _Chunk) -> dict[str, Tensor]:
        """The tensors of a chunk that the next round needs. Without the offset if it is not a sum
        over rounds, and the step itself has already added it to the parameters."""
        used_up = self.at_once and self.algorithm not in ADDING
        return chunk.kept if used_up else {"offset": chunk.offset, **chunk.kept}

    def check(self, state: Mapping[str, Any]) -> None:
        flat = flat_tensors(self.parameters)
        kept = {
            f"{p.name}: {what}": flat[p.name]
            for chunk in self._chunks
            for p in chunk.parameters
            for what in self._saved(chunk)
        }
        check_like("sync", state, {"backwards": int, "mixed": bool, "kept": kept}, complete=True)
        check_like("sync: kept", state["kept"], kept, complete=True)
        require(0 <= state["backwards"] < self._every, "'sync' is not in a round of so many steps")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ended = False
        self._backwards, self._mixed = state["backwards"], state["mixed"]
        for chunk in self._chunks:
            for what, flat in self._saved(chunk).items():
                for p, piece in chunk.pieces(flat):
                    piece.copy_(state["kept"][f"{p.name}: {what}"])


class RuledGossipSync(GossipSync):
    """Gossip by a user's rule. The offset is the weighted sum of the messages."""

    def __init__(self, averager: Averager, choice: Gossip) -> None:
        super().__init__(averager, choice)
        self.at_once = True

    @property
    def rule(self) -> GossipRule:
        assert isinstance(self.algorithm, GossipRule)
        return self.algorithm

    @torch.no_grad()
    def _chunk(self, parameters: Sequence[ModelParameter]) -> _Chunk:
        chunk = _Chunk(parameters)
        chunk.kept = {name: torch.zeros_like(chunk.offset) for name in self.rule.keeps}
        chunk.sent = torch.zeros_like(chunk.offset)
        self.rule.begin(chunk.kept, chunk.here("here"))
        return chunk

    @torch.no_grad()
    def _to_tell(self, chunk: _Chunk) -> Tensor:
        message = self.rule.tell(chunk.kept, chunk.here("here"))
        return chunk.buffer("sent").copy_(message)

    def _take_in(
        self,
        chunk: _Chunk,
        x: Tensor,
        units: Sequence[Unit],
        payloads: Sequence[Payload],
        weight: float,
    ) -> None:
        _add(chunk.sent.zero_(), units, payloads, 1.0)
        torch.mul(chunk.sent, weight, out=chunk.offset)

    @torch.no_grad()
    def _mix_at_once(self, chunk: _Chunk, cf: float) -> None:
        here = chunk.here("here")
        chunk.go_to(self.rule.mix(chunk.kept, here, chunk.sent, chunk.offset))


def _payload(unit: Unit, bucket: Bucket, cfs: StepCFs, tally: Tally) -> Payload:
    """The payload of a unit. Records its gain at the CFs that the step measures."""
    target = bucket.slice_of(unit)
    levels = compress_levels(unit, target) if unit.levels else []
    if levels:
        record_levels(unit, levels, target, tally, strided_sample(target))
    if cfs.send in cfs.measured:
        sent = levels[cfs.measured.index(cfs.send)]
        sent = replace(sent, spec=sent.spec.at(unit.cf))
    else:
        sent = unit.compressor.compress(target, unit.spec)
    return sent.as_nonfinite(bucket.nonfinite)


def _add(out: Tensor, units: Sequence[Unit], payloads: Sequence[Payload], weight: float) -> None:
    """out += weight * (decoded payloads)."""
    for unit, payload in zip(units, payloads, strict=True):
        unit.compressor.add_to(out[unit.start : unit.stop], payload, weight)
