"""Schemas of the custom kinds in deploy/ that no package of a registry brings.

Written for the fields that deploy/ uses: any other field is refused, so that a new one is looked up
before it is written. The kinds' own definitions are the judge in the cluster.
"""

from typing import Any

Schema = dict[str, Any]

_NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_LABELS: Schema = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {"type": "string", "maxLength": 63},
}


def _object(optional: Schema | None = None, **required: Schema) -> Schema:
    """An object of these fields and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": sorted(required),
        "properties": {**required, **(optional or {})},
    }


def _only(value: str) -> Schema:
    return {"const": value}


def _list_of_one(item: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": 1, "items": item}


def _kind(api_version: str, kind: str, spec: Schema) -> tuple[tuple[str, str], Schema]:
    metadata = _object({"labels": _LABELS}, name=_NAME, namespace=_NAME)
    schema = _object(apiVersion=_only(api_version), kind=_only(kind), metadata=metadata, spec=spec)
    return (api_version, kind), schema


_POOL: Schema = _object(
    group=_only("inference.networking.k8s.io"), kind=_only("InferencePool"), name=_NAME
)

SCHEMAS: dict[tuple[str, str], Schema] = dict(
    (
        _kind(
            "monitoring.googleapis.com/v1",
            "PodMonitoring",
            _object(
                selector=_object(matchLabels=_LABELS),
                endpoints=_list_of_one(
                    _object(
                        port={"anyOf": [_NAME, _PORT]},
                        path={"type": "string", "pattern": "^/"},
                        interval={"type": "string", "pattern": "^[1-9][0-9]*s$"},
                    )
                ),
            ),
        ),
        _kind(
            "inference.networking.k8s.io/v1",
            "InferencePool",
            _object(
                selector=_object(matchLabels=_LABELS),
                targetPorts=_list_of_one(_object(number=_PORT)),
                endpointPickerRef=_object(
                    kind=_only("Service"),
                    name=_NAME,
                    port=_object(number=_PORT),
                    failureMode={"enum": ["FailOpen", "FailClose"]},
                ),
            ),
        ),
        _kind(
            "networking.gke.io/v1",
            "HealthCheckPolicy",
            _object(
                targetRef=_POOL,
                default=_object(
                    config=_object(
                        type=_only("HTTP"),
                        httpHealthCheck=_object(
                            requestPath={"type": "string", "pattern": "^/"}, port=_PORT
                        ),
                    )
                ),
            ),
        ),
        _kind(
            "networking.gke.io/v1",
            "GCPBackendPolicy",
            _object(
                targetRef=_POOL,
                default=_object(timeoutSec={"type": "integer", "minimum": 1}),
            ),
        ),
    )
)
