"""Rollouts on several GPUs or machines: a pool of engines, each in a Ray actor of its own.

    start_ray(None, num_actors=2)
    pool = RolloutPool(make_engine, num_actors=2, gpus_per_actor=1)
    pool.load_weights(adapter_weights(trainer.model))          # after each optimizer step: one copy into the object store
    rollouts = pool.generate(prompts, SamplingParams(n=8, seed=0))

In TRL: `attach_ray_rollouts(trainer, pool)`, in place of `attach_flex_rollouts`.

How one `generate` call runs:

    equal prompts ──► groups, dearest first ──► the actor with least to do, while it has room ──► results, in the prompts' order
                              ▲                          │ lost: its unfinished groups go back
                              └──────────────────────────┘

* An actor takes new groups between two looks of its engine, so its decode batch stays full and no actor waits for another while
  there are groups left. Where everything fits into the actors' batches, it is handed out at once, evenly by tokens.
* Noise is a function of (seed, prompt, index of the completion), so completions do not depend on the number of actors or on who ran
  them, but for the arithmetic: products of other row counts may round otherwise.
* Each result carries the version of the weights that sampled it, and a call never mixes two.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import queue
import secrets
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from flex_cli import device_name
from flex_engine import EngineConfig, FlexEngine, InvalidPromptError, RequestOutput, SamplingParams
from flex_lora import is_adapted
from flex_memory import peak_memory_gb
from flex_weights import unwrapped

if TYPE_CHECKING:
    from flex_trl import FlexGeneration
    from trl import GRPOTrainer

RAY = "ray==2.60.0"
MAX_ATTEMPTS = 3  # at a prompt, before it is suspected of killing the actors
SPARE = 8  # an actor is given an eighth more than its batch, so that a row that has ended finds the next one waiting
ALIGNMENT = 64  # bytes between packed tensors
RESOURCES_TIMEOUT, CONNECT_TIMEOUT = 20.0, 5.0  # seconds


def require_ray():
    """The ray module. Raises ImportError saying how to get it."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError(f"rollouts on several actors need Ray, which is optional: pip install {RAY}")
    import ray

    return ray


# -------------------------------------------------------------------------------------------------------------------- weights


@dataclass
class OneBuffer:
    """Named tensors in one array of bytes, which the object store maps into every actor of a machine without a copy."""

    layout: list[tuple[str, torch.dtype, torch.Size, int]]
    data: np.ndarray

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> OneBuffer:
        layout, size = [], 0
        for name, tensor in weights.items():
            layout.append((name, tensor.dtype, tensor.shape, size))
            size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        packed = cls(layout, np.empty(size, dtype=np.uint8))
        for room, tensor in zip(packed.tensors(torch.device("cpu")).values(), weights.values()):
            room.copy_(tensor.detach())
        return packed

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """One transfer to the device, and views of it; not to be written to."""
        with warnings.catch_warnings(action="ignore"):  # the object store's memory is read only
            flat = torch.from_numpy(self.data).to(device)
        return {
            name: flat[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, dtype, shape, offset in self.layout
        }


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """What a broadcast carries: the active adapter's tensors under PEFT's names, or every parameter where there is no adapter. The
    model may be PEFT's or the one inside it, as HFWalker has it."""
    adapted = next((module for module in model.modules() if is_adapted(module)), None)
    if adapted is None:
        return {name: parameter.data for name, parameter in model.named_parameters()}
    from peft import get_peft_model_state_dict

    weights = get_peft_model_state_dict(unwrapped(model), adapter_name=adapted.active_adapters[0], save_embedding_layers=False)
    return {f"base_model.model.{name}": tensor for name, tensor in weights.items()}


def take_over(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copies the weights into the model's. Raises ValueError naming those that one has and the other lacks."""
    places = adapter_weights(model)
    strange, missing = sorted(weights.keys() - places.keys()), sorted(places.keys() - weights.keys())
    if strange or missing:
        problem = f"{strange[0]} is not in the actor's model" if strange else f"{missing[0]} is not among them"
        raise ValueError(f"broadcast weights do not fit: {problem} ({len(strange)} have no place, {len(missing)} are lacking)")
    for name, place in places.items():
        if place.shape != weights[name].shape:
            raise ValueError(f"broadcast weights do not fit: {name} is {tuple(weights[name].shape)}, here {tuple(place.shape)}")
        place.copy_(weights[name])


# ------------------------------------------------------------------------------------------------------------------- an actor


@dataclass
class Group:
    """The unit of work: one prompt, and the params of every request for it. `sequences` and `tokens` are what it may come to."""

    key: int
    prompt: str | list[int]
    params: list[SamplingParams]
    requests: list[int]
    attempts: int = 0

    @property
    def sequences(self) -> int:
        return sum(params.n for params in self.params)

    @property
    def tokens(self) -> int:
        return sum(params.n * params.max_tokens for params in self.params)


@dataclass
class ActorInfo:
    device: str
    max_batch_size: int
    max_seq_len: int
    startup_seconds: float


class ActorsLostError(RuntimeError):
    """No actor is left, or some prompts take every actor with them; names the last one that was lost."""


class Abandoned(Exception):
    """The caller of a `generate` is gone, and what it asked for is not wanted any more."""


class EngineActor:
    """One engine in a process of its own. `run` is one `generate` of the pool; `add` feeds it meanwhile, from another thread."""

    CONCURRENCY = 4  # run, add, close, load

    def __init__(self, make_engine: Callable[[], FlexEngine], version: int, weights: OneBuffer | None):
        started = time.perf_counter()
        try:
            self.engine = make_engine()
        except SystemExit as error:  # a script's one line; Ray would take it for an actor that has done its work
            raise ValueError(str(error)) from error
        self.version = version
        self.lock = threading.Lock()  # held by whoever uses the engine
        self.inbox: dict[int, queue.SimpleQueue[list[Group] | None]] = {}
        self.last_closed = 0
        if weights is not None:
            self.load(version, weights)
        self.startup_seconds = time.perf_counter() - started

    def info(self) -> ActorInfo:
        config = self.engine.config
        return ActorInfo(device_name(self.engine.device), config.max_batch_size, config.max_seq_len, self.startup_seconds)

    def report(self) -> dict[str, object]:
        """The engine's totals, and the most device memory it had."""
        totals = dataclasses.asdict(self.engine.stats())
        if self.engine.device.type == "cuda":
            totals["peak_allocated_gb"], totals["peak_reserved_gb"] = peak_memory_gb()
        return totals

    def load(self, version: int, weights: OneBuffer) -> float:
        """Takes over broadcast weights; returns the seconds it took."""
        started = time.perf_counter()
        with self.lock, torch.no_grad():
            take_over(weights.tensors(self.engine.device), self.engine.walker.model)
            self.engine.refresh_lora()
            self.version = version
        return time.perf_counter() - started

    def run(self, call: int, version: int, groups: list[Group]) -> Iterator[tuple[int, int, list[RequestOutput]]]:
        """Gives (version, key, outputs) of each group as it ends, until the call is closed."""
        inbox = self.inbox.setdefault(call, queue.SimpleQueue())
        inbox.put(groups)
        under_way: dict[int, list[RequestOutput]] = {}
        group_of: dict[int, Group] = {}  # by the number that the engine gives a request

        def arrivals() -> Iterator[tuple[list, list[SamplingParams]]]:
            numbers = 0
            while True:
                prompts, params = [], []
                while not inbox.empty() or not (under_way or prompts):
                    arrived = inbox.get()
                    if arrived is None and under_way:
                        raise Abandoned
                    if arrived is None:
                        return
                    for group in arrived:
                        under_way[group.key] = []
                        for own_params in group.params:
                            group_of[numbers] = group
                            numbers += 1
                            prompts.append(group.prompt)
                            params.append(own_params)
                yield prompts, params

        with self.lock:  # an abandoned call may still be letting go of its pages
            if version != self.version:
                raise RuntimeError(f"asked for weights of version {version}, and this actor has {self.version}")
            try:
                for output in self.engine.stream(arrivals()):
                    group = group_of.pop(output.index)
                    outputs = under_way[group.key]
                    outputs.append(output)
                    if len(outputs) == len(group.params):
                        del under_way[group.key]
                        yield version, group.key, sorted(outputs, key=lambda output: output.index)
            except Abandoned:
                pass
            finally:
                del self.inbox[call]

    def add(self, call: int, groups: list[Group] | None) -> None:
        """More work for a running call; None closes it, and drops what is not finished."""
        if groups is None:
            self.last_closed = call
        if groups is None or call > self.last_closed:
            self.inbox.setdefault(call, queue.SimpleQueue()).put(groups)


# ------------------------------------------------------------------------------------------------------------------- the pool


@dataclass
class Rollout(RequestOutput):
    """A RequestOutput, with the version of the weights that sampled it and the actor that ran it."""

    weights_version: int = 0
    actor: int = 0


@dataclass
class Loss:
    """An actor that went away, and what became of its work."""

    actor: int
    cause: str
    prompts_run_again: int
    restarted: bool


@dataclass
class Broadcast:
    """One `load_weights`: seconds from the caller's tensors to the last actor, of these the copy into the object store, and each
    actor's own."""

    version: int
    gigabytes: float
    seconds: float
    store_seconds: float
    load_seconds: list[float]


@dataclass
class PoolStats:
    """Totals since the pool was made. Lists have one entry per actor, or per event."""

    version: int
    actors: list[ActorInfo]
    prompts: list[int]
    tokens: list[int]
    lost: list[Loss]
    broadcasts: list[Broadcast]


@dataclass(eq=False)
class Member:
    """An actor as the pool sees it. `stream` are its results of the present call."""

    number: int
    handle: object
    starting: object | None  # the reference that its info will come through
    info: ActorInfo | None = None
    stream: object | None = None
    groups: dict[int, Group] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        return sum(group.sequences for group in self.groups.values())

    @property
    def tokens(self) -> int:
        return sum(group.tokens for group in self.groups.values())

    def has_room(self, group: Group) -> bool:
        batch = self.info.max_batch_size
        return not self.groups or self.sequences + group.sequences <= batch + batch // SPARE


class RolloutPool:
    """Engines in Ray actors behind one `generate`. Needs `ray.init` (see `start_ray`), and is not thread safe.

    make_engine: builds an actor's engine, there; what it refers to must be importable on the actors' machines.
    gpus_per_actor: a fraction lets actors share a GPU, whose memory they must leave to each other (`kv_memory_gb`).
    max_restarts: how many lost actors are replaced, in all; a replacement joins as soon as it is ready, and the others go on.

    Raises ValueError where the cluster is too small, or naming why an engine can't be built; any call raises ActorsLostError once
    no actor is left.
    """

    def __init__(
        self, make_engine: Callable[[], FlexEngine], num_actors: int, gpus_per_actor: float = 0.0, cpus_per_actor: float = 1.0,
        max_restarts: int = 1,
    ):  # fmt: skip
        self.ray = require_ray()
        self.make_engine, self.restarts_left = make_engine, max_restarts
        self.options = dict(
            num_gpus=gpus_per_actor, num_cpus=cpus_per_actor, max_restarts=0, max_concurrency=EngineActor.CONCURRENCY
        )
        self._refuse_split_gpus(num_actors, gpus_per_actor)
        self._await_resources({"GPU": gpus_per_actor * num_actors, "CPU": cpus_per_actor * num_actors})
        self.version, self.weights, self.call = 0, None, 0
        self.lost: list[Loss] = []
        self.broadcasts: list[Broadcast] = []
        self.prompts, self.tokens = [0] * num_actors, [0] * num_actors
        self.members = [self._start(actor) for actor in range(num_actors)]
        for member in self.members:
            try:
                self._started(member)
            except self.ray.exceptions.RayError as error:
                self.shutdown()
                raise ValueError(f"actor {member.number} could not start: {cause_of(error)}") from error

    # ------------------------------------------------------------------------------------------------------------ public

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_group: Callable[[int, int], None] | None = None,
        skip_invalid: bool = False,
    ) -> list[Rollout]:
        """Completions of every prompt, in order: `FlexEngine.generate` over all actors. Prompts given alike are computed together.

        `on_group` is told of each group that has ended: how many of how many. Raises InvalidPromptError when all others are done,
        unless `skip_invalid`; ActorsLostError when no actor is left, or naming prompts with which actors were lost again and again.
        """
        self._require_actors()
        groups = make_groups(prompts, params)
        waiting = deque(sorted(groups, key=lambda group: -group.tokens))  # the dearest first: what comes last evens out
        rollouts: list[Rollout | None] = [None] * len(prompts)
        self.call += 1
        ended = 0
        try:
            while ended < len(groups):
                self._hand_out(waiting)
                for member, group, outputs in self._collect(waiting):
                    for request, output in zip(group.requests, outputs):
                        values = vars(output) | {"index": request, "weights_version": self.version, "actor": member.number}
                        rollouts[request] = Rollout(**values)
                    self.prompts[member.number] += 1
                    self.tokens[member.number] += sum(len(c.token_ids) for output in outputs for c in output.outputs)
                    ended += 1
                    if on_group is not None:
                        on_group(ended, len(groups))
        finally:
            for member in self.members:
                member.groups.clear()
                if member.stream is not None:
                    member.handle.add.remote(self.call, None)
                    member.stream = None
        errors = {rollout.index: rollout.error for rollout in rollouts if rollout.error}
        if errors and not skip_invalid:
            raise InvalidPromptError(errors)
        return rollouts

    def load_weights(self, weights: Mapping[str, Tensor]) -> int:
        """Broadcasts new weights (`adapter_weights` of the trainer's model) to all actors. Returns their version."""
        self._require_actors()
        started = time.perf_counter()
        packed = OneBuffer.of(weights)
        self.weights = self.ray.put(packed)
        self.version += 1
        stored = time.perf_counter()
        seconds = self._ask_all("load", self.version, self.weights)
        self.broadcasts.append(
            Broadcast(self.version, packed.data.nbytes / 1e9, time.perf_counter() - started, stored - started, seconds)
        )
        return self.version

    def kill(self, actor: int) -> None:
        """Ends an actor's process at once, as if its machine had failed."""
        self.ray.kill(next(member.handle for member in self.members if member.number == actor))

    def stats(self) -> PoolStats:
        actors = [member.info for member in self.members if member.info is not None]
        return PoolStats(self.version, actors, list(self.prompts), list(self.tokens), list(self.lost), list(self.broadcasts))

    def reports(self) -> list[dict[str, object]]:
        """Each engine's own totals."""
        return self._ask_all("report")

    def shutdown(self) -> None:
        for member in self.members:
            self.ray.kill(member.handle)
        self.members = []

    # ---------------------------------------------------------------------------------------------------------- actors

    @property
    def _went_away(self) -> tuple[type[Exception], ...]:
        exceptions = self.ray.exceptions
        return (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.WorkerCrashedError, exceptions.OutOfMemoryError)

    def _require_actors(self) -> None:
        if not self.members:
            raise ActorsLostError(f"no actor is left: {self._last_loss}" if self.lost else "the pool was shut down")

    @property
    def _last_loss(self) -> str:
        return f"actor {self.lost[-1].actor} was the last to be lost: {self.lost[-1].cause}"

    def _refuse_split_gpus(self, num_actors: int, gpus_per_actor: float) -> None:
        """An actor's share must lie on one GPU; Ray would wait without end for one that fits nowhere."""
        if not 0 < gpus_per_actor < 1:
            return
        gpus, on_each = int(self.ray.cluster_resources().get("GPU", 0)), int(1 / gpus_per_actor + 1e-6)
        if num_actors > gpus * on_each:
            raise ValueError(f"{num_actors} actors of {gpus_per_actor:g} GPU: {gpus} GPUs in the cluster hold {on_each} each")

    def _await_resources(self, wanted: dict[str, float]) -> None:
        """Ray would wait for them without a word, and gives those of a dead process back after a moment."""
        deadline = time.perf_counter() + RESOURCES_TIMEOUT
        while True:
            free = self.ray.available_resources()
            short = [name for name, amount in wanted.items() if amount > free.get(name, 0)]
            if not short:
                return
            if time.perf_counter() > deadline:
                name = short[0]
                raise ValueError(f"the actors need {wanted[name]:g} {name} together, and {free.get(name, 0):g} are free in the cluster")
            time.sleep(0.2)

    def _start(self, number: int) -> Member:
        handle = self.ray.remote(**self.options)(EngineActor).remote(self.make_engine, self.version, self.weights)
        return Member(number, handle, handle.info.remote())

    def _started(self, member: Member) -> None:
        member.info, member.starting = self.ray.get(member.starting), None

    def _ask_all(self, method: str, *arguments) -> list:
        """What a method of every actor returns; for use between calls of `generate`. Those that are lost meanwhile are left out."""
        asked = [(member, getattr(member.handle, method).remote(*arguments)) for member in self.members]
        answers = []
        for member, answer in asked:
            try:
                answers.append(self.ray.get(answer))
            except self._went_away as error:
                self._lose(member, error, deque())
        return answers

    def _lose(self, member: Member, error: Exception, waiting: deque[Group]) -> None:
        """Its unfinished groups go back to the head of the queue; a replacement is started while restarts are left."""
        unfinished = list(member.groups.values())
        for group in unfinished:
            group.attempts += 1
        if deadly := [group.requests[0] for group in unfinished if group.attempts == MAX_ATTEMPTS]:
            raise ActorsLostError(f"{MAX_ATTEMPTS} actors were lost while they ran prompts {deadly[:8]}: {cause_of(error)}") from error
        waiting.extendleft(reversed(unfinished))
        self.members.remove(member)
        restarts = self.restarts_left > 0
        if restarts:
            self.restarts_left -= 1
            self.members.append(self._start(member.number))
        self.lost.append(Loss(member.number, cause_of(error), sum(len(group.requests) for group in unfinished), restarts))
        if not self.members:
            raise ActorsLostError(f"no actor is left: {self._last_loss}") from error

    def _hand_out(self, waiting: deque[Group]) -> None:
        """Waiting groups, one by one, to whoever has least to do among those with room."""
        given: dict[Member, list[Group]] = {}
        while waiting:
            able = [member for member in self.members if member.info is not None and member.has_room(waiting[0])]
            if not able:
                break
            member, group = min(able, key=lambda member: member.tokens), waiting.popleft()
            member.groups[group.key] = group
            given.setdefault(member, []).append(group)
        for member, groups in given.items():
            if member.stream is None:
                member.stream = member.handle.run.options(num_returns="streaming").remote(self.call, self.version, groups)
            else:
                member.handle.add.remote(self.call, groups)

    def _collect(self, waiting: deque[Group]) -> Iterator[tuple[Member, Group, list[RequestOutput]]]:
        """Waits for any actor; gives the groups that have ended."""
        sources = {member.starting or member.stream: member for member in self.members if member.starting or member.stream}
        for source in self.ray.wait(list(sources), num_returns=1)[0]:
            member = sources[source]
            try:
                if member.starting is not None:
                    self._started(member)
                    continue
                version, key, outputs = self.ray.get(next(source))
            except self._went_away as error:
                self._lose(member, error, waiting)
                continue
            assert version == self.version, "a call mixes two versions of the weights"
            yield member, member.groups.pop(key), outputs


class TrainersPool:
    """A pool in the place of a trainer's own engine: each sync is a broadcast of the trained weights."""

    def __init__(self, pool: RolloutPool, trainer: GRPOTrainer):
        self.pool, self.model = pool, trainer.accelerator.unwrap_model(trainer.model)
        self.config = EngineConfig(max_seq_len=min(member.info.max_seq_len for member in pool.members))
        self.eos_ids = sorted(trainer.eos_token_ids)

    def refresh_lora(self) -> None:
        self.pool.load_weights(adapter_weights(self.model))

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Rollout]:
        # What TRL counts as an end, and masks by, is what ends a completion.
        ends = [
            dataclasses.replace(p, ignore_eos=True, stop_token_ids=sorted({*p.stop_token_ids, *(() if p.ignore_eos else self.eos_ids)}))
            for p in params
        ]
        return self.pool.generate(prompts, ends)


def attach_ray_rollouts(trainer: GRPOTrainer, pool: RolloutPool, correct_truncation: bool = False) -> FlexGeneration:
    """`flex_trl.attach_flex_rollouts` with a pool: the actors' engines must have been built over the same base model, wrapped by PEFT
    as the trainer's is. Raises ValueError naming what can't be done."""
    from flex_trl import attach_engine, refuse_unsupported

    refuse_unsupported(trainer)
    return attach_engine(trainer, TrainersPool(pool, trainer), correct_truncation, sleep=False)


def make_groups(
    prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[Group]:
    """Requests for equal prompts together: they share a prefill, and the engine tells their noise apart by counting them. Seeds
    that are None are drawn here, so that a group that is run again gives the same."""
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    groups: dict[str | tuple[int, ...], Group] = {}
    for index, (prompt, own_params) in enumerate(zip(prompts, params, strict=True)):
        if own_params.seed is None:
            own_params = dataclasses.replace(own_params, seed=secrets.randbits(62))
        group = groups.setdefault(prompt if isinstance(prompt, str) else tuple(prompt), Group(len(groups), prompt, [], []))
        group.params.append(own_params)
        group.requests.append(index)
    return list(groups.values())


def cause_of(error: Exception) -> str:
    """The line that matters of an error that came through Ray: its own, or what became of an actor, which stands last."""
    if (cause := getattr(error, "cause", None)) is not None:
        return str(cause)
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    tells_last = "Traceback" in str(error) or "ray::" in lines[0] or lines[0].startswith("The actor died unexpectedly")
    return lines[-1 if tells_last else 0].partition(" Some common causes")[0].removeprefix("The actor is dead because ").rstrip(".")


def start_ray(address: str | None, num_actors: int, cpus_per_actor: float = 1.0) -> None:
    """Connects to a cluster, whose machines are sent these scripts, or starts one on this machine that is large enough for the actors,
    whose processes import what this one can. Does nothing where that has been done. Raises ValueError where no cluster answers at the address."""
    ray = require_ray()
    if ray.is_initialized():
        return
    if address is not None:
        try:
            host, _, port = address.removeprefix("ray://").partition(":")
            if port:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
            ray.init(address=address, runtime_env={"working_dir": str(Path(__file__).parent)}, logging_level="ERROR")
        except (OSError, ValueError) as error:
            raise ValueError(f"no Ray cluster at {address}: {cause_of(error)}") from error
        return
    cpus = max(1, math.ceil(num_actors * cpus_per_actor))  # Ray starts a process for each, and a container may have fewer than it sees
    paths = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    ray.init(
        num_cpus=cpus, num_gpus=torch.cuda.device_count(), runtime_env={"env_vars": paths}, include_dashboard=False,
        logging_level="ERROR", log_to_driver=False,
    )  # fmt: skip
