"""The registry of executors by name: ours, and those of other packages by entry points.

Makes executors from a command line's options or a record's. The options of a constructor are found in
`constructor_options`.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_orchestrator.executors.constructor_options import Option, check_arguments, options_of
from diloco_orchestrator.executors.contract import ExecutorError, ServerlessExecutor
from diloco_orchestrator.executors.mixed import MixedExecutor
from diloco_orchestrator.executors.names import unknown_name
from diloco_orchestrator.executors.places import Places
from diloco_orchestrator.import_names import registered_class, registered_names

ENTRY_POINTS = "diloco_orchestrator.executors"
OURS = {
    "eks": "diloco_orchestrator.executors.eks_jobs:EKSExecutor",
    "hf-jobs": "diloco_orchestrator.executors.hf_jobs:HFJobsExecutor",
    "join": "diloco_orchestrator.join.executor:JoinExecutor",  # outside of this package: it needs a store
    "kubernetes": "diloco_orchestrator.executors.kubernetes_jobs:KubernetesExecutor",
    "local": "diloco_orchestrator.executors.local_process:LocalProcessExecutor",
    "modal": "diloco_orchestrator.executors.modal_sandboxes:ModalExecutor",
    "ray": "diloco_orchestrator.executors.ray_jobs:RayExecutor",
    "slurm": "diloco_orchestrator.executors.slurm_jobs:SlurmExecutor",
}


def executor_names() -> list[str]:
    """Names of all registered executors, whether or not their SDKs are installed."""
    return sorted({*OURS, *registered_names(ENTRY_POINTS)})


def executor_class(name: str) -> type:
    """The executor class registered under a name.

    Raises ValueError if no package or more than one registers the name, or if the registered object is not an executor
    class of that name.
    """
    try:
        return registered_class("executor", ENTRY_POINTS, name, ServerlessExecutor, name in OURS)  # type: ignore[type-abstract]
    except LookupError:
        if name not in OURS:
            raise ValueError(unknown_name("executor", name, executor_names())) from None
        module, _, symbol = OURS[name].partition(":")
        ours: type = getattr(importlib.import_module(module), symbol)
        return ours


def constructor_options(name: str) -> list[Option]:
    """The constructor options of the executor `name`. Raises ValueError if no class, or more than one, has it."""
    return options_of(executor_class(name))


def make_executor(name: str, options: Mapping[str, Any]) -> ServerlessExecutor:
    """A new executor of this name. Options that are None are left out.

    Raises ValueError for an unknown name or option, a missing required option, or a value that the constructor refuses.
    """
    cls = executor_class(name)
    given = {key: value for key, value in options.items() if value is not None}
    check_arguments(cls, given)
    executor: ServerlessExecutor = cls(**given)
    return executor


def executor_of(given: object) -> ServerlessExecutor:
    """`given` if it is an executor; a new one with default options if it is an executor's name.

    Raises ValueError for an unknown name, one with required options, and anything else.
    """
    if isinstance(given, str):
        try:
            return make_executor(given, {})
        except ValueError as error:
            raise ValueError(
                f"executor={given!r}: {error} A name stands for an executor without options; with options pass an "
                "object, such as ModalExecutor(gpu='H100')."
            ) from None
    if not isinstance(given, ServerlessExecutor):
        what = given.__name__ if isinstance(given, type) else type(given).__name__
        example = f"{what}()" if isinstance(given, type) else "ModalExecutor(gpu='H100')"
        raise ValueError(
            f"executor={what} is no executor: pass an object, such as executor={example}, or the name of one: "
            f"{', '.join(executor_names())}."
        )
    return given


def spec_of(executor: ServerlessExecutor) -> dict[str, Any] | None:
    """Name and options of an executor as `run.json` stores them, from which `recreate` makes an equal one elsewhere.

    For an executor with arguments that must not be recorded, their names; `recreate` then raises an error naming them.
    None for an executor whose class is not the one registered under its name or records no options, and for a mixed
    executor or places with such a part.
    """
    if isinstance(executor, Places):
        places = {name: spec_of(each) for name, each in executor.places.items()}
        known = all(spec is not None for spec in places.values())
        # Pairs keep their order, the names of a record do not: `part` falls back on the first place.
        return {"places": list(map(list, places.items())), "usd_per_hour": executor.usd_per_hour} if known else None
    if isinstance(executor, MixedExecutor):
        shares = [{"executor": spec_of(each), "replicas": count} for each, count in executor.shares]
        return None if any(share["executor"] is None for share in shares) else {"shares": shares}
    if executor.options is None and not executor.withheld:
        return None
    try:
        registered = executor_class(executor.name)
    except ValueError:
        return None
    if type(executor) is not registered:
        return None
    if executor.options is None:
        return {"name": executor.name, "withheld": list(executor.withheld)}
    return {"name": executor.name, "options": dict(executor.options)}


def recreate(spec: Mapping[str, Any]) -> ServerlessExecutor:
    """A new executor of the name and options in `spec` (from `spec_of`), with this process's credentials.

    Raises `ExecutorError` if this machine has no such executor, or its constructor refuses the options.
    """
    try:
        return _of_spec(spec)
    except ValueError as error:
        raise ExecutorError(
            f"the executor that launched this run cannot be made here: {error} Install the package that provides it, "
            "or hand an executor over (executor=…, --executor)."
        ) from None


def _of_spec(spec: Mapping[str, Any]) -> ServerlessExecutor:
    if "places" in spec:
        places = {name: _of_spec(each) for name, each in spec["places"]}
        return Places(places, usd_per_hour=spec["usd_per_hour"])
    if "shares" in spec:
        return MixedExecutor([(_of_spec(share["executor"]), share["replicas"]) for share in spec["shares"]])
    if absent := spec.get("withheld"):
        made = executor_class(spec["name"]).__name__
        raise ValueError(
            f"it is {made} with {', '.join(absent)}, which no record holds. Make it again, executor={made}(…)."
        )
    return make_executor(spec["name"], spec["options"])


def make_fleet(
    specs: Sequence[str], options: Mapping[str, Mapping[str, Any]], usd_per_hour: float | None = None
) -> tuple[ServerlessExecutor, int | None]:
    """The executor for the values of `--executor`, and the sum of their replica counts; None without counts.

    `specs`: one name; several with counts, a mixed fleet: ["modal:2", "eks:2"]; or several without, of which
    supervision chooses by price and speed (`Places`); empty: "local". `options`: constructor options by executor name.
    `usd_per_hour`: cost limit of all machines for `Places`. Raises ValueError for invalid names, counts or options, for
    counts at some names and not at others, and for `usd_per_hour` where the places are fixed.
    """
    parsed = [_parsed(spec) for spec in specs or ["local"]]
    uncounted = [name for name, count in parsed if count is None]
    if len(uncounted) == len(parsed) > 1:
        if twice := next((name for name in uncounted if uncounted.count(name) > 1), None):
            raise ValueError(
                f"--executor {twice} is given twice: in Python, Places({{'a': …, 'b': …}}) names two of one kind."
            )
        places = [make_executor(each, options.get(each, {})) for each in uncounted]
        return Places(places, usd_per_hour=usd_per_hour), None
    if usd_per_hour is not None:
        raise ValueError(
            "--usd-per-hour is for several places to choose from: --executor modal --executor hf-jobs. For one place, "
            "or several with counts, there is --max-cost-usd."
        )
    if len(parsed) == 1:
        name, count = parsed[0]
        return make_executor(name, options.get(name, {})), count
    if uncounted:
        raise ValueError(
            f"say how many replicas go to {uncounted[0]}: --executor {uncounted[0]}:2; or give no counts at all, and "
            "each replica goes where tokens cost least."
        )
    mixed = MixedExecutor([(make_executor(name, options.get(name, {})), count or 0) for name, count in parsed])
    return mixed, sum(count or 0 for _, count in parsed)


def _parsed(spec: str) -> tuple[str, int | None]:
    name, colon, count = spec.partition(":")
    executor_class(name)
    if colon and not (count.isdigit() and int(count) > 0):
        raise ValueError(f"--executor {spec}: write NAME or NAME:COUNT, such as {name}:2")
    return name, int(count) if colon else None
