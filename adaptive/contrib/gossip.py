"""Gossip: each rank steps by itself, and exchanges parameters with its neighbours only.

No rank ever has the mean of all. A topology (topology.py) gives each rank a few neighbours,
whatever the number of ranks. So a step costs one latency, not one a rank. W are the weights, g a
rank's own step (the optimizer's, with its momentum and all), C the compressor, x_i the parameters
of rank i, eta the consensus step size:

- D-PSGD (Lian and others 2017, algorithm 1):  x_i <- sum_j W_ij x_j - g_i, uncompressed.
- "naive" sends C(x) in its place: x_i <- sum_j W_ij C(x_j) - g_i. Compression loses a part of the
  parameters in every step anew, and this loss does not fall as training converges. It is here to
  show what the others are for (Tang and others 2018, section 4).
- DCD-PSGD (Tang and others 2018, algorithm 1) compresses differences of a rank's own parameters,
  x_i <- x_i + C(sum_j W_ij x_j - g_i - x_i). So neighbours can follow x_j by what is sent. It needs
  an unbiased C with little noise.
- DeepSqueeze (Tang and others 2019, algorithm 1) steps first, y_i = x_i - g_i, adds its error to
  what it sends, c_i = C(y_i + e_i), e_i <- y_i + e_i - c_i, and mixes:
  x_i <- y_i + eta sum_j W_ij (c_j - c_i).
- CHOCO-SGD (Koloskova and others 2019, algorithm 2) steps first, sends how far a replica that all
  neighbours have of it lags behind, c_i = C(y_i - h_i), h_i <- h_i + c_i, and mixes:
  x_i <- y_i + eta sum_j W_ij (h_j - h_i).

A rank needs only the weighted sum of its neighbours' replicas, which is the sum of what arrives. So
all five keep one tensor, the *offset*: the weighted difference of the neighbours' parameters from
this rank's. Some keep one more: DeepSqueeze its error, DCD-PSGD and CHOCO-SGD the replica that
neighbours have of this rank.

Rows and columns of W add up to 1, so offsets add up to 0 over the ranks. The mean of the ranks'
parameters moves by the mean of their own steps: exactly so with D-PSGD, DeepSqueeze and CHOCO-SGD,
with DCD-PSGD less the present loss of C.

D-PSGD, DCD-PSGD and "naive" mix before the next step. Messages travel during forward and backward,
whose gradient is of where the rank stood. DeepSqueeze and CHOCO-SGD keep the order of their papers,
and wait for messages in `optimizer.step()`.

With `every=H` a rank takes H steps between two exchanges, and g is their sum (for CHOCO-SGD and
D-PSGD: Li and others 2019, "Communication-Efficient Local Decentralized SGD Methods"). A round is
one exchange and the steps before it. A step of the policy and of the record is a round.

A rule of a user's own (`GossipRule`) keeps what it likes, and mixes in the step itself.
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

from adaptive.bucket.bucket import (
    Bucket,
    BucketLayout,
    StepCFs,
    Unit,
    compress_levels,
    record_gradient_norms,
    record_levels,
    strided_sample,
)
from adaptive.contrib.topology import TOPOLOGIES, Topology, TopologyName, check_matrices, named
from adaptive.exchange.strategies import Outgoing, pack, unpack
from adaptive.memory.handover import Groups
from adaptive.memory.inspection import MovedBetweenSteps
from adaptive.memory.optimizer_sync import unite_moments
from adaptive.memory.options import NAMED, Memory
from adaptive.memory.rule import Kept
from adaptive.model.chunks import Chunk, chunks
from adaptive.model.parameters import ModelParameter, shaped
from adaptive.model.state import check_like, flat_tensors
from adaptive.model.uniting import averaged, unite
from adaptive.network.link import done_with
from adaptive.settings.synchronisation import Synchronisation, check_all_moved
from adaptive.statistics.vector import Tally
from adaptive.step.averager import Averager
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
a larger one the ranks may diverge (docs/research/gossip.md)."""

AT_ONCE = ("deepsqueeze", "choco-sgd")
"""Algorithms that mix in the step itself."""

ADDING = ("dcd-psgd", "choco-sgd")
"""Algorithms whose offset is the sum of all that has arrived."""


class GossipRule(ABC):
    """A gossip rule says what a rank tells its neighbours, and where it goes from what they say.

    A round is `Gossip.every` steps of the rank's own optimizer, then one exchange: all send what
    `tell` returns, compressed by the base, and go to what `mix` returns, in `optimizer.step()`.
    Tensors are those of several parameters, flat, so a rule goes element by element. It holds
    settings, alike on all ranks, and no state of its own: what is kept is saved with the run.

    keeps: names of what a rank keeps, zero at first.
    """

    keeps: tuple[str, ...] = ()

    def begin(self, kept: Kept, here: Tensor) -> None:  # noqa: B027 - may do nothing
        """Fill what is kept, in place, where all ranks stand alike: at first, and whenever they
        have gone to their mean."""

    @abstractmethod
    def tell(self, kept: Kept, here: Tensor) -> Tensor:
        """What is sent by a rank whose steps have come to `here` (flat). Nothing is changed."""

    @abstractmethod
    def mix(self, kept: Kept, here: Tensor, sent: Tensor, mean: Tensor) -> Tensor:
        """Where the rank goes on from. It may change `kept`, in place.

        sent: what this rank's own message decodes to. mean: sum of what the rank and its neighbours
        have sent, by the weights of the topology."""

    def __repr__(self) -> str:
        """Its class and its settings: what must be alike on all ranks."""
        return settings_of(self)


@dataclass(frozen=True, eq=False)
class Gossip(Synchronisation):
    """Each rank steps alone and exchanges parameters with its neighbours (docs/research/gossip.md).
    No rank ever has the mean of all ranks. A step costs one latency, whatever the number of ranks.
    Gossip needs policy "fixed" (its default), "schedule" or "warmup", and one optimizer of all
    parameters.

    topology: the neighbours of each rank: "ring", "torus", "exponential" (1, 2, 4, ... ranks away),
        "one_peer" (one neighbour of "exponential" in each step, by turns), "complete", or a doubly
        stochastic matrix of shape (ranks, ranks), or several that take turns.
    algorithm: "d-psgd" (for base "none"), "dcd-psgd" (compresses differences, for unbiased bases),
        "deepsqueeze" (has error feedback), "choco-sgd" (compresses differences from a replica) or
        "naive" (does not converge, for comparison). "auto": "d-psgd" with base "none", "choco-sgd"
        with a biased base, "dcd-psgd" with an unbiased one. Or a `GossipRule`: one of your own
        (docs/research/gossip.md), which mixes in `optimizer.step()`.
    consensus_step: with "deepsqueeze" and "choco-sgd", a rank moves by this share of the weighted
        difference from its neighbours, in (0, 1]. A larger CF needs a smaller one. None: 2 / CF
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
            checks.fraction("consensus_step", self.consensus_step)
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
                "gossip does not go with LBFGS, of whose backwards one rank may need more than "
                "another in a step"
            )
        check_all_moved("gossip", optimizers, names)

    def check_policy(self, policy: Policy, compresses: bool) -> None:
        own = not isinstance(policy, DeclaredPolicy)  # of the user
        follows = own or isinstance(policy, Fixed | Schedule | Warmup)
        if policy.layerwise or (compresses and not follows):
            raise ValueError(
                f"policy must be 'fixed', 'schedule' or 'warmup' with gossip: gains of parameters "
                f"tell nothing of the quality of training; got {policy.name!r}"
            )

        if policy.measures:
            raise ValueError(
                f"policy must measure nothing of its own with gossip, which hands it no gradients; "
                f"got {policy.name!r} with measures={policy.measures}"
            )

    def messages(self, ranks: int) -> float:
        return self.topology_of(ranks).messages

    def start(self, averager: Averager) -> GossipSync:
        ruled = isinstance(self.algorithm, GossipRule)
        return RuledGossipSync(averager, self) if ruled else GossipSync(averager, self)

    def topology_of(self, ranks: int) -> Topology:
        """ValueError if this number of ranks cannot have the topology."""
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
    """Messages of the neighbours, under way: how to read them, and the weights of their senders in
    the order of the rows."""

    units: Sequence[Unit]
    weights: Sequence[float]
    arrived: Callable[[], Tensor]


@dataclass(eq=False)
class _Chunk(Chunk):
    """Parameters that travel as one message; all tensors are flat.

    offset: see above. kept: by name, what the algorithm or the rule keeps besides. sent: what this
    rank's last message decodes to, for a rule."""

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
    """Gossip of one model, whose parameters are alike on all ranks when it begins.

    choice: of an algorithm; with a rule see `RuledGossipSync`. The last backward of a round has its
    exchange even if its step is left out: then no rank waits for this one."""

    def __init__(self, averager: Averager, choice: Gossip) -> None:
        super().__init__(averager)
        self.algorithm = choice.algorithm
        self.at_once = self.algorithm in AT_ONCE
        self.parameters = list(averager.parameters.values())
        self.topology = choice.topology_of(averager.exchange.world_size)
        self._every = choice.every
        self._backwards = 0  # since the last exchange, but for one whose exchange is to come
        self._open = False  # the last backward of a round has ended, and its exchange is to come
        self._step_at = choice.step_at
        self._granularity, self._exchange = averager.sizes.granularity, averager.exchange
        self._moved = MovedBetweenSteps(averager.parameters, averager.optimizers, choice)
        self._stepped: Optimizer | None = None  # the last one that has, whether handed over or not
        self._begin()

    # -- what the ranks do --

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Gradients stay what they are."""
        if bucket.index() == 0:
            self.make_up()
            if self._ends_round:
                self._moved.look(self._exchange)
                self.averager.begin(self.alike)
        return done_with(bucket.buffer())

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        self._open = self._ends_round
        self.averager.controller.skipped += not self._open
        self._backwards = (self._backwards + 1) % self._every
        return last

    @property
    def _ends_round(self) -> bool:
        """The backward under way is the last of a round. All ranks have done as many."""
        return self._backwards == self._every - 1

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        averager = self.averager
        came = self._open or self._backwards > 0  # a backward, since the last exchange
        if came and not self._mixed and optimizer in averager.optimizers:
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
        # DDP may have a collective in it, for which a rank that left its step out would wait.
        self.make_up()

    @property
    def owes(self) -> bool:
        return self._open

    def make_up(self) -> None:
        if self._open:
            self.averager.check_whole()
            with self.averager.noting_failure():
                self._mix()
            self._tell_neighbours()

    def _tell_neighbours(self) -> None:
        """Once for each round: after its last step, or where that was left out, later."""
        if not self._open:
            return
        averager, controller = self.averager, self.averager.controller
        stopwatch = controller.stopwatch
        entered = stopwatch.timestamps()
        with stopwatch.held_up(), averager.noting_failure():
            self._mixed = self.at_once
            for index, chunk in enumerate(self._chunks):
                self._send(index, chunk, controller.step, controller.cfs, controller.tally)
            sent = stopwatch.timestamps()
            if self.at_once:  # with the step size of this step's CF
                for chunk in self._chunks:
                    self._receive(chunk)
                    self._mix_at_once(chunk, controller.cfs.send)
            arrived = stopwatch.timestamps()
            controller.tally.at("grad").fill_(nan)  # nobody looks at gradients
            controller.end_step(averager.watch.take_found())
        self._open = False
        stopwatch.hook_left(entered, [(sent, arrived)])

    # -- between steps --

    def wait(self) -> None:
        self._receive_all()

    def abandon(self) -> None:
        with suppress(Exception):  # of neighbours that have failed
            self._receive_all()  # or their next message would be taken for this one
        self._open = False

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        return ()

    def averaged(self) -> AbstractContextManager[None]:
        self.make_up()
        self.wait()
        return averaged(self.parameters, self._exchange)

    def unite(self) -> Sequence[Optimizer]:
        stepped = [] if self._stepped is None else [self._stepped]
        optimizers = [*(of for of in self.averager.optimizers if of not in stepped), *stepped]
        self.make_up()
        self.wait()
        unite(self.parameters, self._exchange)
        unite_moments(self.parameters, optimizers, self._exchange)
        self._begin()
        return optimizers

    def stop(self) -> None:
        self.unite()

    def describe(self) -> str:
        return f"{self.algorithm} on a topology: {self.topology}"

    # -- the algorithms --

    def _begin(self) -> None:
        """From parameters that are alike on all ranks."""
        self._chunks = [self._chunk(each) for each in chunks(self.parameters)]
        self._mixed = True  # with what neighbours have sent last

    def _chunk(self, parameters: Sequence[ModelParameter]) -> _Chunk:
        chunk = _Chunk(parameters)
        if self.algorithm == "deepsqueeze":
            chunk.kept["error"] = torch.zeros_like(chunk.offset)
        elif self.algorithm in ADDING:  # of where all stand
            chunk.kept["replica"] = chunk.here("replica").clone()
        return chunk

    def _mix(self) -> None:
        """Before the optimizer's step: add the offset, with what neighbours have sent, if that is
        not done yet."""
        if self._mixed:
            return
        self._mixed = True
        for chunk in self._chunks:
            self._receive(chunk)
            chunk.move(chunk.offset, 1.0)

    def _mix_at_once(self, chunk: _Chunk, cf: float) -> None:
        """Messages of the neighbours have been added to the offset."""
        chunk.move(chunk.offset, self._step_at(cf))

    def _send(self, index: int, chunk: _Chunk, step: int, cfs: StepCFs, tally: Tally) -> None:
        """Compress what there is to tell of a chunk, and hand it to the neighbours."""
        rank = self._exchange.rank
        x = self._to_tell(chunk)
        bucket = self._bucket(chunk, x, step)
        units = [unit.at(step) for unit in self._granularity.cut(bucket, cfs)]
        record_gradient_norms(units, x, tally)
        payloads = [_payload(unit, bucket, cfs, tally) for unit in units]
        tally.at("nonfinite").add_(torch.as_tensor(bucket.nonfinite))
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
        """What is compressed and sent, in a buffer of its own."""
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
        """Take this rank's own message, of `x`, into its offset and into what it keeps."""
        if self.algorithm not in ADDING:
            chunk.offset.zero_()
        if self.algorithm in ("d-psgd", "naive"):  # from where the rank stands to the weighted sum
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
        """`x` in the form of one of DDP's buckets. A value that is not finite makes neighbours'
        parameters not finite, as a gradient in dense DDP would."""
        key = Key("", step, rank=self._exchange.rank)
        bucket = Bucket(x, key, self._granularity.whole_buckets, chunk.layout)
        bucket.nonfinite = all_finite(x) ^ True
        fill_if(bucket.nonfinite, x, 0.0)
        return bucket

    def _receive(self, chunk: _Chunk) -> None:
        """Add messages that are under way to the offset."""
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
        """Wait for all messages that are under way. The parameters stay as they are."""
        for chunk in self._chunks:
            self._receive(chunk)

    # -- saved --

    def state_dict(self) -> dict[str, Any]:
        self._receive_all()
        kept: dict[str, Tensor] = {}
        for chunk in self._chunks:
            for what, flat in self._lasting(chunk).items():
                kept |= {f"{name}: {what}": each for name, each in chunk.by_name(flat).items()}
        return {"backwards": self._backwards, "mixed": self._mixed, "kept": kept}

    def _lasting(self, chunk: _Chunk) -> dict[str, Tensor]:
        """What the next round needs of a chunk. An offset that is not a sum over rounds has been
        used up where the step itself mixes."""
        used_up = self.at_once and self.algorithm not in ADDING
        return chunk.kept if used_up else {"offset": chunk.offset, **chunk.kept}

    def check(self, state: Mapping[str, Any]) -> None:
        flat = flat_tensors(self.parameters)
        kept = {
            f"{p.name}: {what}": flat[p.name]
            for chunk in self._chunks
            for p in chunk.parameters
            for what in self._lasting(chunk)
        }
        check_like("sync", state, {"backwards": int, "mixed": bool, "kept": kept}, complete=True)
        check_like("sync: kept", state["kept"], kept, complete=True)
        require(0 <= state["backwards"] < self._every, "'sync' is not in a round of so many steps")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._open = False
        self._backwards, self._mixed = state["backwards"], state["mixed"]
        for chunk in self._chunks:
            for what, flat in self._lasting(chunk).items():
                for p, piece in chunk.pieces(flat):
                    piece.copy_(state["kept"][f"{p.name}: {what}"])


class RuledGossipSync(GossipSync):
    """Gossip by a user's rule. The offset is the weighted sum of what was sent."""

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
        told = self.rule.tell(chunk.kept, chunk.here("here"))
        return chunk.buffer("sent").copy_(told)

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
    """What is sent of a unit; the CFs that the step measures are measured on it."""
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
    """out += weight * what the payloads stand for."""
    for unit, payload in zip(units, payloads, strict=True):
        unit.compressor.add_to(out[unit.start : unit.stop], payload, weight)
