"""The user's pod template: read from YAML, checked by the official client's models, merged with an attempt's pod.

Pure but for reading the file. The attempt's own objects are in `kubernetes_objects`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_orchestrator.executors.contract import MissingSdk
from diloco_orchestrator.executors.names import looks_secret, unknown_name

CONTAINER = "replica"
_LIST = re.compile(r"[Ll]ist\[(.+)\]")
_DICT = re.compile(r"[Dd]ict[\[(]str, ?(.+)[\])]")
_PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "datetime": str, "date": str}
_KINDS = {"str": "text", "int": "a whole number", "bool": "true or false", "float": "a number"}
_OURS = ("pod_template.spec.containers", "pod_template.spec.containers[0].name")  # required, and the executor's to set
# Lists whose items Kubernetes tells apart by a field: an item of the attempt replaces the template's of the same name.
_NAMED_BY = {"env": "name", "volumes": "name", "volumeMounts": "mountPath", "imagePullSecrets": "name"}


def read_template(given: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """A pod template as a dict: `{"metadata": …, "spec": …}`; empty for None.

    `given`: that dict, or a YAML file with it, or with a whole Pod or PodTemplate. Raises ValueError for a file that
    cannot be read, an unknown field (naming the nearest), a value of another type, a field that the executor sets
    itself, or a literal that looks secret. Raises `MissingSdk` without the Kubernetes client.
    """
    if given is None:
        return {}
    body = dict(given) if isinstance(given, Mapping) else _read(Path(given))
    if body.get("kind") == "PodTemplate":
        body = dict(body.get("template") or {})
    elif body.get("kind") == "Pod" or "spec" in body or "metadata" in body:
        body = {name: value for name, value in body.items() if name not in ("apiVersion", "kind")}
    _check_fields(body, "V1PodTemplateSpec", "pod_template")
    containers = body.get("spec", {}).get("containers") or []
    if len(containers) > 1 or any(each.get("name", CONTAINER) != CONTAINER for each in containers):
        raise ValueError(
            f"pod_template.spec.containers may only hold the container {CONTAINER!r}: a Job ends when all its "
            "containers have ended. Let a sidecar be one of initContainers, with restartPolicy: Always."
        )
    for each in containers:
        for name in ("command", "args"):
            if name in each:
                raise ValueError(f"pod_template.spec.containers[0].{name} is the executor's. Leave it out.")
        if "nvidia.com/gpu" in ((each.get("resources") or {}).get("limits") or {}):
            raise ValueError(
                "pod_template asks for GPUs. Leave that to gpu=: a replica gets one for each of its ranks."
            )
    everything = [*containers, *(body.get("spec", {}).get("initContainers") or [])]
    for each in (variable for container in everything for variable in container.get("env") or []):
        if "value" in each and looks_secret(str(each.get("name"))):
            raise ValueError(
                f"pod_template: the variable {each['name']} looks like a secret, and run.json can be read by everybody "
                "who reads the bucket. Hand it over with secrets= (--secret NAME), or refer to a Secret (valueFrom)."
            )
    return body


def container_of(template: Mapping[str, Any]) -> Mapping[str, Any]:
    """The only container of a pod template; empty for a template without one."""
    containers = (template.get("spec") or {}).get("containers") or [{}]
    container: Mapping[str, Any] = containers[0]
    return container


def env_names(container: Mapping[str, Any]) -> set[str]:
    """Names of the variables that a container sets."""
    return {str(each.get("name")) for each in container.get("env") or []}


def _read(path: Path) -> dict[str, Any]:
    try:
        import yaml  # a dependency of the Kubernetes client
    except ImportError:
        raise _missing() from None
    try:
        body = yaml.safe_load(path.read_text())  # type: ignore[no-untyped-call]
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"pod_template {str(path)!r} cannot be read: {error}.") from None
    if not isinstance(body, dict):
        raise ValueError(f"pod_template {str(path)!r} holds no mapping. Write metadata: and spec:, as of a Pod.")
    return body


def _missing() -> MissingSdk:
    return MissingSdk("pod_template needs the Kubernetes client: pip install 'diloco-orchestrator[eks]'")


def _check_fields(value: Any, kind: str, path: str) -> None:
    """Raise ValueError unless `value` has the type `kind` of the official client, a model or a plain type, in all its
    fields.

    `path`: names the value in errors.
    """
    if value is None or kind == "object":
        return
    if found := _LIST.fullmatch(kind):
        if not isinstance(value, list | tuple):
            raise ValueError(f"{path} = {value!r} is no list.")
        for index, each in enumerate(value):
            _check_fields(each, found[1], f"{path}[{index}]")
    elif found := _DICT.fullmatch(kind):
        if not isinstance(value, Mapping):
            raise ValueError(f"{path} = {value!r} is no mapping.")
        is_quantity = path.endswith((".limits", ".requests"))
        for name, each in value.items():
            if not (is_quantity and isinstance(each, int | float)):  # a quantity may be a number
                _check_fields(each, found[1], f"{path}.{name}")
    elif kind in _PLAIN:
        right = isinstance(value, _PLAIN[kind]) and not (isinstance(value, bool) and kind != "bool")  # type: ignore[arg-type]
        if not right:
            quotes = f" Put it in quotes: {str(value)!r}." if kind == "str" else ""
            raise ValueError(f"{path} = {value!r} is not {_KINDS.get(kind, kind)}.{quotes}")
    else:
        _check_model(value, kind, path)


def _check_model(value: Any, kind: str, path: str) -> None:
    try:
        from kubernetes.client import models
    except ImportError:
        raise _missing() from None
    model = getattr(models, kind, None)
    if model is None:
        return  # a type of another kind, such as IntOrString
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} = {value!r} is no mapping.")
    names = {field: attribute for attribute, field in model.attribute_map.items()}
    for field, each in value.items():
        if field not in names:
            raise ValueError(f"{path}: {unknown_name('field', str(field), names)}")
        _check_fields(each, model.openapi_types[names[field]], f"{path}.{field}")
    # Clients before version 36 have no such table of fields: there the API server finds what is missing.
    known = getattr(model, "model_fields", {})
    for field, attribute in names.items():
        if (
            field not in value
            and f"{path}.{field}" not in _OURS
            and attribute in known
            and known[attribute].is_required()
        ):
            raise ValueError(f"{path} has no {field!r}, which every {kind.removeprefix('V1')} needs.")


# -- merging ----------------------------------------------------------------------------------------------------------


def merged(template: Any, ours: Any, path: str = "pod_template") -> Any:
    """The pod `ours` plus the additions of the user's `template`. Raises ValueError where the template sets another
    value.

    Mappings are merged by name; lists are concatenated, the template's items first, except items of the same name or
    path. Alternatives of a required node affinity are combined, so that a node has to match both.
    """
    if template is None or template == ours:
        return ours
    if isinstance(template, Mapping) and isinstance(ours, Mapping):
        if path.endswith(".requiredDuringSchedulingIgnoredDuringExecution") and "nodeSelectorTerms" in ours:
            return {"nodeSelectorTerms": _both(template.get("nodeSelectorTerms") or [], ours["nodeSelectorTerms"])}
        shared = {name: merged(template[name], ours[name], f"{path}.{name}") for name in ours if name in template}
        return {**template, **ours, **shared}
    if isinstance(template, list | tuple) and isinstance(ours, list):
        if path.endswith(".containers"):
            return [merged(template[0], ours[0], f"{path}[0]")] if template else ours
        return _joined(template, ours, path)
    raise ValueError(f"{path} = {template!r}: the executor sets it to {ours!r}. Leave it out of the template.")


def _joined(template: Sequence[Any], ours: Sequence[Any], path: str) -> list[Any]:
    by = _NAMED_BY.get(path.rpartition(".")[2])
    taken = {each.get(by) for each in ours} if by else set()
    for each in template if path.endswith(".volumes") else ():
        if each.get("name") in taken and each not in ours:
            raise ValueError(f"{path}: the executor has a volume {each['name']!r} of its own. Give yours another name.")
    kept = [each for each in template if (each.get(by) not in taken if by else each not in ours)]
    return [*kept, *ours]


def _both(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Alternative node selector terms that match a node which one of `first` and one of `second` match."""
    if not first or not second:
        return [dict(each) for each in first or second]
    return [_and(one, other) for one in first for other in second]


def _and(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    joined = {name: [*(one.get(name) or []), *(other.get(name) or [])] for name in ("matchExpressions", "matchFields")}
    return {name: parts for name, parts in joined.items() if parts}


# -- kinds of GPUs ----------------------------------------------------------------------------------------------------

# Labels of nodes that name their GPU, and how each spells "H100".
_GPU_LABELS = (
    ("nvidia.com/gpu.product", str),  # NVIDIA's GPU feature discovery: the full name, "NVIDIA-H100-80GB-HBM3"
    ("karpenter.k8s.aws/instance-gpu-name", str.lower),
    ("eks.amazonaws.com/instance-gpu-name", str.lower),  # EKS Auto Mode
    ("cloud.google.com/gke-accelerator", str.lower),  # "nvidia-h100-80gb"
)


def gpu_affinity(types: Sequence[str]) -> dict[str, Any]:
    """Node affinity to nodes with one of these GPU types, earlier ones preferred. Empty for no types.

    A type is the value of one of the labels in `_GPU_LABELS`, or LABEL=VALUE for a label of another cluster.
    """
    if not types:
        return {}
    required: dict[str, list[str]] = {}
    preferred = []
    for rank, each in enumerate(types):
        for label, value in _labels_of(each):
            required.setdefault(label, []).append(value)
            preferred.append({"weight": max(1, 100 - 10 * rank), "preference": _term(label, [value])})
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [_term(label, values) for label, values in required.items()]
            },
            "preferredDuringSchedulingIgnoredDuringExecution": preferred,
        }
    }


def _labels_of(given: str) -> list[tuple[str, str]]:
    label, equals, value = given.partition("=")
    return [(label, value)] if equals else [(name, spelled(given)) for name, spelled in _GPU_LABELS]


def _term(label: str, values: Sequence[str]) -> dict[str, Any]:
    return {"matchExpressions": [{"key": label, "operator": "In", "values": list(values)}]}
