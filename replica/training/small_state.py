"""`SmallState`: training state small enough for every manifest, so that no restart loses it, whatever the quorum.

It holds the `state_dict` of the user's small stateful objects, such as learning-rate schedules, and the hyperparameters
of the inner optimizer's parameter groups, which schedules change: as they are, and as they were at `attach`, so that a
training function that sets another value in a later leg is obeyed. Larger objects are saved beside payloads, as often
as `replica_state` says (`checkpoint`).
"""

import base64
import copy
import logging
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from diloco_orchestrator.errors import ConfigError, RecordInvalid
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.replica.training.tensor_tree import check_packable, pack, unpack

log = logging.getLogger(__name__)

LIMIT = 64 * 2**10  # bytes of one object's packed state, uncompressed
_GROUPS, _OBJECTS, _MADE = "groups", "stateful", "made"
# Hyperparameters that schedules of torch set, or go by.
_OF_SCHEDULES = frozenset(
    ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas")
)


def check_stateful(given: Any) -> Mapping[str, Any]:
    """The objects given to `attach` as `stateful`. Raises `ConfigError` unless each can save and load its state."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"stateful is a {type(given).__name__}: it must map names to objects, as in "
            'attach(stateful={"schedule": schedule}), so that a restarted replica finds each one again.'
        )
    for name, each in given.items():
        missing = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(each, method, None))]
        if missing or not isinstance(name, str):
            what = f"a {type(each).__name__} without {' and '.join(missing)}" if missing else "named by no text"
            raise ConfigError(
                f"stateful[{name!r}] is {what}: each object needs a text as its name, state_dict and load_state_dict. "
                "Give it those methods, or hold its values in a small object that has them."
            )
    return given


class SmallState:
    """Encodes for manifests, and loads, the training state of one replica that is small: states of user objects, such
    as schedules, and optimizer hyperparameters.

    `stateful`: the user's objects, by name. `new`: whether the training function has just made them, so that `load`
    keeps hyperparameters that it sets to other values now than when the loaded state was saved.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | InnerOptimizers, stateful: Mapping[str, Any], new: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._stateful = stateful
        self._made = copy.deepcopy(self.hyperparameters()) if new else None

    def encode(self) -> str:
        """The states of the small stateful objects and the optimizers' hyperparameters, as text for a manifest."""
        tree = {_GROUPS: self.hyperparameters(), _OBJECTS: dict(self._states(small=True))}
        if self._made is not None:
            tree[_MADE] = self._made
        return base64.b64encode(zlib.compress(pack(tree), 9)).decode()

    def check(self, large: bool) -> None:
        """Raise `ConfigError` if the state of one of the user's objects holds a value that cannot be saved.

        `large`: whether to check states too large for a manifest too, which are saved beside payloads.
        """
        for small in (True, False) if large else (True,):
            for name, state in self._states(small=small):
                check_packable(state, f"the state of stateful[{name!r}]")

    def large(self) -> dict[str, Any]:
        """The states of the user's objects that are too large for manifests, by name."""
        return dict(self._states(small=False))

    def load(self, text: str, where: str, rates: str | None = None) -> set[str]:
        """Load a result of `encode`; returns the names of the objects in it. `where`: names the manifest in errors.

        `rates`: unless None, another result, from which hyperparameters and torch's learning-rate schedules are taken;
        empty: these stay as they are. Raises `RecordInvalid` for any other text.
        """
        if not text:
            return set()  # a manifest of an earlier version
        tree = _decode(text, where)
        for name, each in self._stateful.items():
            if torch_schedule(each) is None and name in tree[_OBJECTS]:
                each.load_state_dict(tree[_OBJECTS][name])
        if rates is None or rates:
            self.set_rates(tree if rates is None else _decode(rates, where), self._stateful)
        return set(tree[_OBJECTS])

    def rates(self) -> dict[str, Any]:
        """A copy of the states of torch's schedules and of the hyperparameters that they set."""
        schedules = {name: each for name, each in self._stateful.items() if torch_schedule(each) is not None}
        states = {name: each.state_dict() for name, each in schedules.items()}
        return copy.deepcopy({_GROUPS: self.hyperparameters(), _OBJECTS: states, _MADE: self._made or []})

    def set_rates(self, rates: Mapping[str, Any], names: Iterable[str], alone: bool = False) -> None:
        """Set hyperparameters, and torch's schedules among `names`, to a result of `rates` or of `rates_in`.

        `alone`: only hyperparameters that these schedules set, in their optimizers.
        """
        names, of = list(names), set[int]()
        for name in names:
            if torch_schedule(self._stateful[name]) is not None and name in rates[_OBJECTS]:
                self._stateful[name].load_state_dict(copy.deepcopy(rates[_OBJECTS][name]))
        for schedule in filter(None, (torch_schedule(self._stateful[name]) for name in names)):
            of |= set(map(id, schedule.optimizer.param_groups))
        self.set_hyperparameters(rates[_GROUPS], of if alone else None)
        self._keep_new(rates.get(_MADE, []))

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Learning rate, weight decay and the like of each parameter group."""
        return [
            {name: value for name, value in group.items() if name != "params" and _is_plain(value)}
            for group in self._optimizer.param_groups
        ]

    def set_hyperparameters(self, groups: list[dict[str, Any]], of: Collection[int] | None = None) -> None:
        """Set the hyperparameters to `groups`, if the optimizer has that number of parameter groups.

        `of`: unless None, `id` of the only groups that are set, to what schedules set in them.
        """
        if len(groups) != len(self._optimizer.param_groups):
            log.warning(
                "the optimizer has %d parameter groups, and had %d when its learning rates were saved: those that the "
                "training function sets are used",
                len(self._optimizer.param_groups),
                len(groups),
            )
            return
        for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
            for name, value in saved.items():
                if of is None or (id(group) in of and name in _OF_SCHEDULES):
                    _set(group, name, value)

    def _keep_new(self, before: list[dict[str, Any]]) -> None:
        """Set hyperparameters that the training function has set to another value than `before` to that value.

        A learning rate that follows a schedule stays at the same share of its initial one. `before`: hyperparameters as
        the training function set them when the loaded state was saved; empty if an earlier version saved it.
        """
        made = copy.deepcopy(self._made or [])
        if not len(before) == len(made) == len(self._optimizer.param_groups):
            return
        kept, schedules = set(), [each for each in map(torch_schedule, self._stateful.values()) if each is not None]
        by_metric = any(isinstance(each, ReduceLROnPlateau) for each in schedules)
        for group, then, now in zip(self._optimizer.param_groups, before, made, strict=True):
            changed = {name: now[name] for name in now.keys() & then.keys() if not _same(now[name], then[name])}
            height = _peak(group if "initial_lr" in group else then)  # not of `then`, which may never have counted
            if ("initial_lr" in group or by_metric) and float(height):
                changed.pop("lr", None)  # the first value of a schedule
                if not _same(_peak(now), _peak(then)):
                    share = float(_peak(now)) / float(height)
                    changed["lr"] = group["lr"] * share
                    if "initial_lr" in group and "initial_lr" not in now:  # the schedule is made after `attach`
                        changed["initial_lr"] = group["initial_lr"] * share
            kept |= {f"{name}={value} instead of {group.get(name)}" for name, value in changed.items()}
            for name, value in changed.items():
                _set(group, name, value)
        if kept:
            log.info("the training function sets other hyperparameters now, which count: %s", ", ".join(sorted(kept)))
            for each in schedules:
                _follow_rates(each)

    def _states(self, *, small: bool) -> Iterator[tuple[str, Any]]:
        for name, each in sorted(self._stateful.items()):
            state = each.state_dict()
            if (_size(state) <= LIMIT) is small:
                yield name, state


def stateful_in(text: str, where: str) -> Mapping[str, Any]:
    """The states of the small stateful objects in a result of `SmallState.encode`, by name; none in an empty text.

    `where`: names the manifest in errors. Raises `RecordInvalid` for any other text.
    """
    return states_in(rates_in(text, where))


def rates_in(text: str, where: str) -> dict[str, Any]:
    """A result of `SmallState.encode` as `SmallState.set_rates` takes it; without anything for an empty text.

    `where`: names the manifest in errors. Raises `RecordInvalid` for any other text.
    """
    return _decode(text, where) if text else {_GROUPS: [], _OBJECTS: {}}


def states_in(rates: Mapping[str, Any]) -> Mapping[str, Any]:
    """The states of stateful objects, by name, in a result of `rates_in` or of `SmallState.rates`."""
    found: Mapping[str, Any] = rates[_OBJECTS]
    return found


def same_but_for_version(recorded: str, found: str) -> bool:
    """Whether a result of `SmallState.encode` in a record says what a new one says, of the same training.

    What the version that wrote the record did not write does not count. Raises `RecordInvalid` for any other text.
    """
    if not recorded or not found:
        return recorded == found
    then, now = _decode(recorded, "the record"), _decode(found, "the repetition")
    if _MADE not in then:
        now.pop(_MADE, None)
    return pack(then) == pack(now)


def torch_schedule(given: Any) -> LRScheduler | None:
    """The schedule of torch that an object is, or that accelerate has wrapped in it; None for any other object."""
    inner = given.scheduler if type(given).__name__ == "AcceleratedScheduler" else given
    return inner if isinstance(inner, LRScheduler) else None


def _peak(group: Mapping[str, Any]) -> Any:
    """The learning rate that a parameter group's schedule takes shares of; the group's own if it has no schedule."""
    return group.get("max_lr", group.get("initial_lr", group["lr"]))  # `max_lr` is that of a OneCycleLR


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(group.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
        group[name].copy_(value)  # in place: a capturable step reads this tensor
    else:
        group[name] = value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())
    return bool(one == other)


def _follow_rates(schedule: LRScheduler) -> None:
    """Let a schedule of torch, and those of which it consists, go on from its optimizer's learning rates."""
    for part in getattr(schedule, "_schedulers", []):
        _follow_rates(part)
    groups = schedule.optimizer.param_groups
    if hasattr(schedule, "base_lrs"):
        schedule.base_lrs = [group["initial_lr"] for group in groups]
    schedule._last_lr = [group["lr"] for group in groups]


def _decode(text: str, where: str) -> dict[str, Any]:
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True))
    except (ValueError, zlib.error) as error:
        raise RecordInvalid(f"the small state in {where} cannot be decoded ({error}): it was changed.") from None
    tree: dict[str, Any] = unpack([data], where)
    return tree


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def _size(tree: Any) -> int:
    """The approximate size of a nested state in bytes."""
    match tree:
        case torch.Tensor():
            return tree.numel() * tree.element_size()
        case dict():
            return sum(_size(key) + _size(value) for key, value in tree.items())
        case list() | tuple():
            return sum(map(_size, tree))
        case str():
            return len(tree)
        case _:
            return 8
